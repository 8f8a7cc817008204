"""`torch_dist`: torch.distributed's all-to-all, on any device.

torch_dist    the transport, and combines that go home block by block of experts
chunks        tokens that several chunks of experts share travel once
"""
