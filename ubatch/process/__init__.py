"""State of the whole process, independent of lanes.

registry    parts that are registered by name and imported on first use
interrupts  state that stays correct when Ctrl-C arrives between any two lines
patches     temporary replacement of torch's functions
cores       number of cores for this process
machine     identity of the machine
heartbeat   sign of life for a watching process, and calls during which there is none
files       writing files whole
yaml_file   reading a YAML file of settings, within bounds
foreign     packages of other projects that shadow ours
lateness    a rank tells its peers that it needs longer
job_store   messages between ranks in the rendezvous store
"""

from ubatch.process.cores import num_cores
from ubatch.process.files import write_whole
from ubatch.process.heartbeat import Heart, beat, stop_hearts
from ubatch.process.yaml_file import read_yaml

__all__ = ["Heart", "beat", "num_cores", "read_yaml", "stop_hearts", "write_whole"]
