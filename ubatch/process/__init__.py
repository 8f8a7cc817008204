"""State of the whole process, independent of lanes.

registry    parts that are registered by name and imported on first use
interrupts  state that stays correct when Ctrl-C arrives between any two lines; temporary patches of torch
machine     identity of the machine, and number of cores for this process
heartbeat   sign of life for a watching process, and calls during which there is none
files       writing files whole, and reading a YAML file of settings within bounds
foreign     packages of other projects that shadow ours
job_store   messages between ranks in the rendezvous store; a rank tells its peers there that it needs longer
"""

from ubatch.process.files import read_yaml, write_whole
from ubatch.process.heartbeat import Heart, beat, stop_hearts
from ubatch.process.machine import num_cores

__all__ = ["Heart", "beat", "num_cores", "read_yaml", "stop_hearts", "write_whole"]
