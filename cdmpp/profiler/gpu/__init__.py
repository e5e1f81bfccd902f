"""Building and measuring on CUDA GPUs; what measures needs neither TVM nor torch. ``make`` compiles programs into a file
(``bundle``), which ``measure`` measures on the GPU of ``cupy`` or a test's."""
