"""From rows to pictures. Needs the ``plot`` extra."""
