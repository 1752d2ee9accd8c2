// SPDX-License-Identifier: BSD-3-Clause
// element.cuh: from memory to the type of the computation and back, one element
// or 16 bytes at a time. Also compiles for the host, where tests run it.
#ifndef OPTFUSE_CUDA_ELEMENT_CUH
#define OPTFUSE_CUDA_ELEMENT_CUH

#if defined(OF_FORM)
#include "op_by_op_element.h"
#elif defined(OF_RUNS_PROGRAMS)
#include "program_element.h"
#else
#include "../cpu/instance.h"
#endif

#ifdef __CUDACC__
#if defined(OF_DTYPE_BFLOAT16) || defined(OF_STATE_BFLOAT16)
#include <cuda_bf16.h>
#endif
#ifdef OF_DTYPE_FLOAT16
#include <cuda_fp16.h>
#endif
#else
#include "../cpu/narrow.h"
#endif

#define OF_DEVICE_FN static __device__ __forceinline__

// As many elements as fill 16 bytes, or one.
enum { OF_LANES = 16 / sizeof(of_stored) };

template <int N, typename T = of_stored> struct alignas(N * sizeof(T)) of_pack {
    T lane[N];
} __attribute__((may_alias));

#if !defined(OF_IS_NARROW)
OF_DEVICE_FN of_real of_widen(of_stored stored) {
    return stored;
}
OF_DEVICE_FN of_stored of_narrow(of_real value) {
    return value;
}
#elif !defined(__CUDACC__)
OF_DEVICE_FN of_real of_widen(of_stored stored) {
    return OF_PASTE(of, OF_PASTE(OF_DTYPE, widen))(stored);
}
OF_DEVICE_FN of_stored of_narrow(of_real value) {
    return OF_PASTE(of, OF_PASTE(OF_DTYPE, narrow))(value);
}
#elif defined(OF_DTYPE_BFLOAT16)
OF_DEVICE_FN of_real of_widen(of_stored stored) {
    return __bfloat162float(__ushort_as_bfloat16(stored));
}
OF_DEVICE_FN of_stored of_narrow(of_real value) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
}
OF_RULE_FN of_real aten_round(of_real x) {
    return __bfloat162float(__float2bfloat16_rn(x));
}
#else
OF_DEVICE_FN of_real of_widen(of_stored stored) {
    return __half2float(__ushort_as_half(stored));
}
OF_DEVICE_FN of_stored of_narrow(of_real value) {
    return __half_as_ushort(__float2half_rn(value));
}
OF_RULE_FN of_real aten_round(of_real x) {
    return __half2float(__float2half_rn(x));
}
#endif

// The same for an element of the state.
#if !defined(OF_STATE_BFLOAT16)
OF_DEVICE_FN of_real of_widen_state(of_stored_state stored) {
    return of_widen(stored);
}
OF_DEVICE_FN of_stored_state of_narrow_state(of_real value) {
    return of_narrow(value);
}
#elif !defined(__CUDACC__)
OF_DEVICE_FN of_real of_widen_state(of_stored_state stored) {
    return of_bfloat16_widen(stored);
}
OF_DEVICE_FN of_stored_state of_narrow_state(of_real value) {
    return of_bfloat16_narrow(value);
}
#else
OF_DEVICE_FN of_real of_widen_state(of_stored_state stored) {
    return __bfloat162float(__ushort_as_bfloat16(stored));
}
OF_DEVICE_FN of_stored_state of_narrow_state(of_real value) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
}
#endif

template <int N, typename T> OF_DEVICE_FN of_pack<N, T> of_load(const T *from, uint64_t at) {
    return *reinterpret_cast<const of_pack<N, T> *>(from + at);
}

template <int N, typename T>
OF_DEVICE_FN void of_store(T *to, uint64_t at, const of_pack<N, T> &pack) {
    *reinterpret_cast<of_pack<N, T> *>(to + at) = pack;
}

#endif
