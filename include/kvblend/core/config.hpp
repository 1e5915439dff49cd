// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Version, ABI namespace and host/device annotation. Every other header starts here.
#pragma once

#define KVBLEND_VERSION_MAJOR 0
#define KVBLEND_VERSION_MINOR 1
#define KVBLEND_VERSION_PATCH 0

// All names live in kvblend::<ABI namespace>, an inline namespace. Two vendored copies of different versions can so be
// linked into one program; a project that patches its copy defines its own name here.
#ifndef KVBLEND_ABI_NAMESPACE
#define KVBLEND_ABI_NAMESPACE v0_1
#endif

// Device compilers need the annotation on whatever a kernel calls; for other compilers it is nothing.
#if defined(__CUDACC__)
#define KVBLEND_HOST_DEVICE __host__ __device__
#else
#define KVBLEND_HOST_DEVICE
#endif

// 1 where a function's device code is compiled, which may then differ from its host code. On the device alone the two
// that follow say whether a loop is unrolled: where its values are to stay in registers, or where it is long.
#if defined(__CUDA_ARCH__)
#define KVBLEND_ON_DEVICE 1
#define KVBLEND_UNROLL _Pragma("unroll")
#define KVBLEND_ROLLED _Pragma("unroll 1")
#else
#define KVBLEND_ON_DEVICE 0
#define KVBLEND_UNROLL
#define KVBLEND_ROLLED
#endif
