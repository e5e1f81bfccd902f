"""Building and measuring on CUDA GPUs; what measures needs neither TVM nor torch.

``make`` compiles programs into a file (``bundle``), by way of ``build``, ``lowering``, ``compile`` and ``limits``. ``measure``
measures such a file: ``measurer`` deals programs to the process of ``sampling``, on a GPU as ``device`` says, which is that of
``cupy`` or a test's.
"""
