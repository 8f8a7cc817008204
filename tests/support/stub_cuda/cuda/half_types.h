// The names of half-precision types that the headers of cuBLAS and NCCL mention. CUDA's own headers for them need
// libcu++, which the packages do not bring; no function here looks at such a number.
#pragma once
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
struct __half;
struct __nv_bfloat16;
