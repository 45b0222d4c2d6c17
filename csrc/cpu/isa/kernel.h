// Stand-in.
#pragma once
namespace mla {
namespace baseline {
void twice(float* x, long n);
}
namespace avx2 {
void twice(float* x, long n);
}
namespace avx512 {
void twice(float* x, long n);
}
namespace avx512_bf16 {
void twice(float* x, long n);
}
}  // namespace mla
