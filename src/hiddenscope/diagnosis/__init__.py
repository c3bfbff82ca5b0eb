"""What `hiddenscope doctor` finds: the environment, the devices and the cache.

Every check stands by itself, and one that fails is reported as a problem. Nothing here
imports torch into this process, and nothing reaches the network.
"""

from hiddenscope.diagnosis.check import Check as Check
from hiddenscope.diagnosis.diagnose import diagnose as diagnose
