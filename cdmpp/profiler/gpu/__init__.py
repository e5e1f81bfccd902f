"""Building and measuring programs for CUDA GPUs. Measuring needs neither TVM nor torch: ``make`` compiles programs into a file
(``bundle``), and ``measure`` measures them on the GPU that ``cupy`` drives, or on the simulated GPU of a test."""
