"""Monte Carlo exceedances of noise scores."""

from .api import Exceedances, exceedance_counts
from .laws import Noise

__all__ = ["Exceedances", "Noise", "exceedance_counts"]
