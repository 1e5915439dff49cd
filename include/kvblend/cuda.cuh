// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The CUDA back end: what is under cuda/, but for the tests' ThrustExecution. Compilers other than CUDA's take it too,
// without what runs on a CUDA stream, and need no header of the toolkit for it.
#pragma once

#include <kvblend/cuda/backend.hpp>
#include <kvblend/cuda/execution.hpp>
#include <kvblend/cuda/fusor.hpp>
#include <kvblend/cuda/layer_loader.hpp>
#include <kvblend/cuda/operations.hpp>
#include <kvblend/cuda/shifter.hpp>
#include <kvblend/cuda/stream_execution.cuh>
#include <kvblend/cuda/streams.cuh>
