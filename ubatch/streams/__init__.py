"""Streams of a device: which stream the lanes' work runs on, and how long memory lives.

streams          streams and events: CUDA's, or null objects; number of SMs reserved for communication
lane_streams     one lane's use of the two streams; keeps tensors alive while a stream uses them
small_copies     small tensors to and from the device, without a wait
graph_protocols  CUDA graphs: the interface that a device must offer
"""

from ubatch.streams.graph_protocols import Capture, current_capture
from ubatch.streams.small_copies import HostCopy, Packing, carried_by, staged, to_device, to_host
from ubatch.streams.streams import Event, NullStreams, StreamBackend, make_streams

__all__ = [
    "Capture",
    "Event",
    "HostCopy",
    "NullStreams",
    "Packing",
    "StreamBackend",
    "carried_by",
    "current_capture",
    "make_streams",
    "staged",
    "to_device",
    "to_host",
]
