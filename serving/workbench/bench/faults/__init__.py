"""`ubatch bench faults`: engines die, hang and fail while requests run; the answers must be those of a server where
nothing happens.

    answers           the requests, and what comes of them
    referee           whether it is right: a pure rule, and a server that is not disturbed
    shared            what the sections share, what was promised, and requests that run meanwhile
    ranks             SIGKILL of a random engine, in several configurations; SIGSTOP, exceptions, too little memory;
                      requests that kill engines; the limit of restarts
    pause, cost, soak how long a stream stands still; throughput when nothing fails; what grows
    nodes             a second machine that is killed and comes back, or is cut off
    command           flags, and the verdict
"""
