"""Hand-written GPU kernels with parameters, as scheduled TIR: what the configurations of public auto-tuning data stand for.

Each module has the function of the task, unscheduled, and the function of the kernel: from the parameters of a
configuration to a PrimFunc with its blocks, threads, tiles, vector widths, unrolled loops and shared memory. Buffers in
shared memory and registers are indexed as the tensors they hold parts of, as in MetaSchedule's programs; TVM shrinks
them when it lowers.

What a configuration chooses and TIR cannot say (a read-only cache) is an annotation of the block, so that two
configurations are never one program.
"""
