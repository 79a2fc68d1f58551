"""Cells on a cluster: the same work, the same bits, through ``dask.distributed``.

=================  ==================================================================================================
``address``        what ``--scheduler`` may say
``pace``           how long tasks take, as learned from those done, and how many to send at once
``dispatch``       which tasks are where, which to send again, and what counts: knows nothing of Dask, and no clock
``cluster``        the same on Dask: connecting, sending, receiving, losing
``work``           what a worker does
``plan``           cells, draws, time and price of a run before it is run
=================  ==================================================================================================

Only ``cluster`` imports Dask (``pip install 'theory-lab[cluster]'``), and only once a scheduler was asked for.
"""
