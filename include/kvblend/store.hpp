// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// All of store/: chunks, what identifies them, where they lie, and how they come back. Needs xxHash and nlohmann-json.
#pragma once

#include <kvblend/store/chunk.hpp>
#include <kvblend/store/chunk_file.hpp>
#include <kvblend/store/chunk_header.hpp>
#include <kvblend/store/digest.hpp>
#include <kvblend/store/file_tier.hpp>
#include <kvblend/store/identity.hpp>
#include <kvblend/store/layer_loader.hpp>
#include <kvblend/store/memory_tier.hpp>
#include <kvblend/store/posix_file.hpp>
#include <kvblend/store/reader.hpp>
#include <kvblend/store/safetensors.hpp>
#include <kvblend/store/thread_launcher.hpp>
#include <kvblend/store/throttle.hpp>
