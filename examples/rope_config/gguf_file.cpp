// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include <rope_config/gguf_file.hpp>

#include <kvblend/core/bits.hpp>

#include <cerrno>
#include <cstring>
#include <exception>
#include <filesystem>
#include <system_error>

#include "ggml.h"
#include "gguf.h"

namespace rope_config {

using kvblend::Status;
using kvblend::StatusCode;

void GgufFile::FreeHeader::operator()(gguf_context* header) const { gguf_free(header); }

Status GgufFile::corrupt(const char* what) const {
  return Status::error(StatusCode::corrupt, "%s", what).at("%s", name_.c_str());
}

std::int64_t GgufFile::find(const std::string& key) const { return gguf_find_key(header_.get(), key.c_str()); }

bool GgufFile::is_list(const char* suffix) const {
  const std::int64_t id = find(key(suffix));
  return id >= 0 && gguf_get_kv_type(header_.get(), id) == GGUF_TYPE_ARRAY;
}

bool GgufFile::has_tensor(const std::string& tensor) const {
  return gguf_find_tensor(header_.get(), tensor.c_str()) >= 0;
}

Status GgufFile::open(const char* path) {
  const std::filesystem::path file(path);
  name_ = file.filename().string();
  std::error_code error;
  const auto kind = std::filesystem::status(file, error).type();
  if (kind == std::filesystem::file_type::not_found) {
    return Status::error(StatusCode::not_found, "no such file").at("%s", path);
  }
  if (kind == std::filesystem::file_type::directory) {
    return Status::error(StatusCode::invalid_argument, "is a directory, not a GGUF file").at("%s", path);
  }
  file_.reset(std::fopen(path, "rb"));
  if (file_ == nullptr) {
    return Status::error(StatusCode::io_error, "cannot be opened: %s", std::strerror(errno)).at("%s", path);
  }
  size_ = std::filesystem::file_size(file, error);
  if (error) return Status::error(StatusCode::io_error, "%s", error.message().c_str()).at("%s", path);
  char magic[4] = {};
  if (std::fread(magic, 1, sizeof magic, file_.get()) != sizeof magic || std::memcmp(magic, GGUF_MAGIC, 4) != 0) {
    return corrupt(size_ == 0 ? "is empty" : "is not a GGUF file");
  }
  try {
    header_.reset(gguf_init_from_file(path, {/*no_alloc=*/true, /*ctx=*/nullptr}));
  } catch (const std::exception&) {
    header_.reset();
  }
  if (header_ == nullptr) return corrupt("has a GGUF header that is cut or damaged");
  return read_text("general.architecture", architecture_);
}

Status GgufFile::read(const char* suffix, std::int32_t& out, bool required) const {
  const std::string name = key(suffix);
  const std::int64_t id = find(name);
  if (id < 0) {
    return required ? Status::error(StatusCode::not_found, "the file has no such key").at("%s", name.c_str())
                    : Status{};
  }
  std::int64_t value = -1;
  switch (gguf_get_kv_type(header_.get(), id)) {
    case GGUF_TYPE_UINT32: value = gguf_get_val_u32(header_.get(), id); break;
    case GGUF_TYPE_INT32: value = gguf_get_val_i32(header_.get(), id); break;
    case GGUF_TYPE_UINT64: value = static_cast<std::int64_t>(gguf_get_val_u64(header_.get(), id)); break;
    case GGUF_TYPE_ARRAY:
      return Status::error(StatusCode::unsupported, "differs from layer to layer").at("%s", name.c_str());
    default: break;
  }
  if (value < 0 || value > (1 << 30)) {
    return Status::error(StatusCode::corrupt, "is not a sensible integer").at("%s", name.c_str());
  }
  out = static_cast<std::int32_t>(value);
  return {};
}

Status GgufFile::read(const char* suffix, double& out) const {
  const std::string name = key(suffix);
  const std::int64_t id = find(name);
  if (id < 0) return {};
  if (gguf_get_kv_type(header_.get(), id) != GGUF_TYPE_FLOAT32) {
    return Status::error(StatusCode::corrupt, "is not a float").at("%s", name.c_str());
  }
  out = static_cast<double>(gguf_get_val_f32(header_.get(), id));
  if (kvblend::is_finite(out)) return {};
  return Status::error(StatusCode::corrupt, "is not finite").at("%s", name.c_str());
}

Status GgufFile::read(const char* suffix, bool& out) const {
  const std::string name = key(suffix);
  const std::int64_t id = find(name);
  if (id < 0) return {};
  if (gguf_get_kv_type(header_.get(), id) != GGUF_TYPE_BOOL) {
    return Status::error(StatusCode::corrupt, "is not true or false").at("%s", name.c_str());
  }
  out = gguf_get_val_bool(header_.get(), id);
  return {};
}

Status GgufFile::read(const char* suffix, std::vector<std::int32_t>& out) const {
  const std::string name = key(suffix);
  const std::int64_t id = find(name);
  if (id < 0) return {};
  if (gguf_get_kv_type(header_.get(), id) != GGUF_TYPE_ARRAY) {
    return Status::error(StatusCode::corrupt, "is not a list").at("%s", name.c_str());
  }
  const gguf_type type = gguf_get_arr_type(header_.get(), id);
  if (type != GGUF_TYPE_INT32 && type != GGUF_TYPE_UINT32 && type != GGUF_TYPE_BOOL) {
    return Status::error(StatusCode::corrupt, "is not a list of integers").at("%s", name.c_str());
  }
  const std::size_t count = gguf_get_arr_n(header_.get(), id);
  const void* data = gguf_get_arr_data(header_.get(), id);
  std::vector<std::int32_t> values(count);
  if (type == GGUF_TYPE_BOOL) {
    const auto* bytes = static_cast<const std::int8_t*>(data);
    for (std::size_t i = 0; i < count; ++i) values[i] = bytes[i] != 0 ? 1 : 0;
  } else if (count > 0) {
    std::memcpy(values.data(), data, count * sizeof values[0]);
  }
  out = std::move(values);
  return {};
}

Status GgufFile::read_text(const std::string& name, std::string& out) const {
  const std::int64_t id = find(name);
  if (id < 0) return {};
  if (gguf_get_kv_type(header_.get(), id) != GGUF_TYPE_STRING) {
    return Status::error(StatusCode::corrupt, "is not text").at("%s", name.c_str());
  }
  out = gguf_get_val_str(header_.get(), id);
  return {};
}

Status GgufFile::read_tensor(const std::string& tensor, std::int64_t rows, std::int64_t columns,
                             std::vector<float>& out) {
  const std::int64_t id = gguf_find_tensor(header_.get(), tensor.c_str());
  if (id < 0) return Status::error(StatusCode::not_found, "the file has no such tensor").at("%s", tensor.c_str());
  const std::int64_t* shape = gguf_get_tensor_ne(header_.get(), id);
  if (shape[0] != columns || shape[1] != rows || shape[2] != 1 || shape[3] != 1) {
    return Status::error(StatusCode::mismatch, "has shape [%lld, %lld], must have [%lld, %lld]",
                         static_cast<long long>(shape[1]), static_cast<long long>(shape[0]),
                         static_cast<long long>(rows), static_cast<long long>(columns))
        .at("%s", tensor.c_str());
  }
  const ggml_type type = gguf_get_tensor_type(header_.get(), id);
  const ggml_type_traits* traits = ggml_get_type_traits(type);
  if (type != GGML_TYPE_F32 && traits->to_float == nullptr) {
    return Status::error(StatusCode::unsupported, "has type %s, which ggml cannot turn into floats", traits->type_name)
        .at("%s", tensor.c_str());
  }
  const std::uint64_t first = gguf_get_data_offset(header_.get()) + gguf_get_tensor_offset(header_.get(), id);
  const std::uint64_t bytes = gguf_get_tensor_size(header_.get(), id);
  if (first > size_ || bytes > size_ - first) {
    return Status::error(StatusCode::corrupt, "ends at byte %llu of a file of %llu: it was cut",
                         static_cast<unsigned long long>(first + bytes), static_cast<unsigned long long>(size_))
        .at("%s", tensor.c_str());
  }
  out.resize(static_cast<std::size_t>(rows * columns));
  void* target = out.data();
  if (type != GGML_TYPE_F32) {
    raw_.resize(bytes);
    target = raw_.data();
  }
  if (std::fseek(file_.get(), static_cast<long>(first), SEEK_SET) != 0 ||
      std::fread(target, 1, bytes, file_.get()) != bytes) {
    return Status::error(StatusCode::io_error, "cannot be read from %s", name_.c_str()).at("%s", tensor.c_str());
  }
  if (type != GGML_TYPE_F32) traits->to_float(raw_.data(), out.data(), rows * columns);
  return {};
}

}  // namespace rope_config
