"""Building and measuring on CUDA GPUs; what measures needs neither TVM nor torch.

``make`` compiles programs into a file (``bundle``), by way of ``build``, ``compile`` and ``limits``. ``measure`` measures such
a file: ``sampling`` deals programs to a process of its own, on the GPU of ``cupy`` or a test's.
"""
