// Kernels of cupy.py: one waits, one says on which multiprocessors it runs, one keeps the GPU busy.
__device__ unsigned long long now() {
  unsigned long long t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t;
}
extern "C" __global__ void wait_ns(unsigned long long ns) {
  unsigned long long end = now() + ns; while (now() < end) { }
}
extern "C" __global__ void seen_sms(unsigned int* seen) {
  unsigned int id; asm volatile("mov.u32 %0, %smid;" : "=r"(id));
  unsigned long long end = now() + 20000; while (now() < end) { }
  if (threadIdx.x == 0) atomicOr(seen + id, 1u);
}
extern "C" __global__ void busy(float* x, int n) {
  float v = x[blockIdx.x * blockDim.x + threadIdx.x];
  for (int i = 0; i < n; ++i) v = v * 0.999f + 0.001f;
  x[blockIdx.x * blockDim.x + threadIdx.x] = v;
}
