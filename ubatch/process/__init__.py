"""What concerns the whole process, and knows nothing of lanes.

registry    parts that are registered by name and imported when asked for
interrupts  what holds when Ctrl-C comes between any two lines
patches     functions of torch that are replaced for a while
cores       how many there are for this process
machine     which one this process runs on
heartbeat   a sign of life, for whoever watches
silences    calls that keep this process from giving one
foreign     packages of other projects that shadow ours
lateness    a rank says that it takes long
job_store   what ranks tell each other in the rendezvous store
"""
