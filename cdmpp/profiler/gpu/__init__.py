"""Building and measuring on CUDA GPUs; what measures needs neither TVM nor torch.

:mod:`~cdmpp.profiler.gpu.make` compiles programs into a file (:mod:`~cdmpp.profiler.gpu.bundle`), by way of ``build``,
``lowering``, ``compile`` and ``limits``. :mod:`~cdmpp.profiler.gpu.measure` measures such a file: ``measurer`` deals programs to
the process of ``sampling``, on a GPU as ``device`` says, which is ``cupy``'s or a test's.
"""
