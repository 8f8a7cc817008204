"""The GPU benchmarks: `make bench-gpu`, or `python -m serving.workbench.gpu`.

    checks      the tests that need a GPU, in sections too: `make test-gpu`; as pytest's plugin it writes each result
    parts       chooses sections, the most important ones first
    report      figures with their goals, tables, JSON, markdown
    bench       shared by the sections: the device, timing on it, its ceilings, the time budget
    run         the list of sections; runs each in a process of its own, so that one's failure spares the others
    experts     fused MoE against the bandwidth floor, the matrix peak, and other libraries; grouped GEMMs next to a
                transport that holds SMs while it sends
    attention   paged decode attention against the copy bandwidth; linear attention of prompts
    prefill     overlapped prefill against the best serial one, over `host_loopback`, in graphs
    decode      CPU time of a decode step that is a CUDA graph; cost of a hand-off in eager steps
    model       a model with random weights and a batch for it, as the model runner would plan it

On a CPU (`--device cpu --tiny`) every section runs on shapes small enough for Triton's interpreter, as a smoke test.
"""
