"""The GPU benchmarks: `make bench-gpu`, or `python -m serving.workbench.gpu`.

    checks      the tests that need a GPU, in sections too: `make test-gpu`; `pytest_lines` writes what each gave
    parts       which sections come first
    report      figures with their goals, tables, JSON, markdown
    bench       what sections share: the device, timing on it, its ceilings, the time budget
    sections    one by one, each in a process of its own, so that what breaks one leaves the others alone
    experts     fused MoE against the bandwidth floor, the matrix peak, and peers
    attention   paged decode attention against the copy bandwidth
    prefill     overlapped prefill against the best serial one, over `host_loopback`, in graphs
    decode      what a decode step costs the CPU where it is a graph
    lanes       what a hand-off costs where nothing is captured
    model       a model with random weights and a batch for it, as the model runner would plan it
    peers       the same experts computed by others that are installed

On a CPU (`--device cpu --tiny`) every section runs, on shapes that Triton's interpreter can do, and measures nothing.
"""
