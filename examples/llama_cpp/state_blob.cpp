// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// One walk through a blob serves both who learn its format and who compare it to a known one. A blob may be any bytes:
// each count is held against what remains before anything is made of it.
#include <llama_cpp/state_blob.hpp>

#include <sys/mman.h>

#include <bit>
#include <cstdio>
#include <cstring>
#include <limits>
#include <utility>

namespace llama_cpp {

using kvblend::Position;
using kvblend::Result;
using kvblend::Status;
using kvblend::StatusCode;

namespace {

static_assert(std::endian::native == std::endian::little, "llama.cpp writes blobs in the machine's order");

constexpr std::int64_t kMost32 = (std::numeric_limits<std::int32_t>::max)();
constexpr std::int64_t kHeadBytes = 4 + 4;         // magic, sequence
constexpr std::int64_t kCountBytes = 4 + 4;        // streams, cells
constexpr std::int64_t kCellBytes = 4 + 4 + 4;     // position, sequences, sequence
constexpr std::int64_t kLayersBytes = 4 + 4;       // values transposed, layers
constexpr std::int64_t kLayerBytes = 2 * (4 + 8);  // of keys and of values: type, and row bytes or their two factors

// Names a field of a blob, once there is something to say of it.
struct Where {
  const char* field;
  std::size_t body = 0;
  const char* item = nullptr;  // "cell" or "layer"
  std::size_t index = 0;
  bool of_body = true;

  Where with(const char* other) const {
    Where where = *this;
    where.field = other;
    return where;
  }
  Status at(Status status) const {
    if (!of_body) return std::move(status).at("%s", field);
    if (item == nullptr) return std::move(status).at("body %zu, %s", body, field);
    return std::move(status).at("body %zu, %s %zu, %s", body, item, index, field);
  }
};

Where of_blob(const char* field) { return {field, 0, nullptr, 0, false}; }

// What remains of a blob.
class Cursor {
 public:
  explicit Cursor(std::span<const std::byte> blob) : rest_(blob) {}

  [[nodiscard]] std::size_t left() const { return rest_.size(); }

  Status skip(std::uint64_t bytes, const std::byte*& start, const Where& where) {
    if (bytes > rest_.size()) {
      return where.at(Status::error(StatusCode::corrupt, "is cut: %zu bytes of %llu", rest_.size(),
                                    static_cast<unsigned long long>(bytes)));
    }
    start = rest_.data();
    rest_ = rest_.subspan(static_cast<std::size_t>(bytes));
    return {};
  }

  // A number stored as Raw, in [least, most].
  template <class Raw>
  Status number(std::int64_t& value, std::int64_t least, std::int64_t most, const Where& where) {
    Raw raw{};
    KVBLEND_RETURN_IF_ERROR(read(raw, where));
    if (std::cmp_less(raw, least) || std::cmp_greater(raw, most)) return where.at(outside(raw, least, most));
    value = static_cast<std::int64_t>(raw);
    return {};
  }

  // A number stored as Raw that must be `wanted`.
  template <class Raw>
  Status expect(std::int64_t wanted, const Where& where) {
    Raw raw{};
    KVBLEND_RETURN_IF_ERROR(read(raw, where));
    if (std::cmp_equal(raw, wanted)) return {};
    return where.at(
        Status::error(StatusCode::mismatch, "is %s, not %lld", Text(raw).text, static_cast<long long>(wanted)));
  }

 private:
  struct Text {
    char text[24];
    explicit Text(std::int64_t value) { std::snprintf(text, sizeof text, "%lld", static_cast<long long>(value)); }
    explicit Text(std::uint64_t v) { std::snprintf(text, sizeof text, "%llu", static_cast<unsigned long long>(v)); }
    explicit Text(std::int32_t value) : Text(std::int64_t{value}) {}
    explicit Text(std::uint32_t value) : Text(std::uint64_t{value}) {}
  };

  template <class Raw>
  Status read(Raw& raw, const Where& where) {
    const std::byte* start = nullptr;
    KVBLEND_RETURN_IF_ERROR(skip(sizeof raw, start, where));
    std::memcpy(&raw, start, sizeof raw);
    return {};
  }
  template <class Raw>
  static Status outside(Raw raw, std::int64_t least, std::int64_t most) {
    return Status::error(StatusCode::out_of_range, "is %s, not in [%lld, %lld]", Text(raw).text,
                         static_cast<long long>(least), static_cast<long long>(most));
  }

  std::span<const std::byte> rest_;
};

struct WalkedBody {
  std::int32_t cells = 0;
  Position first_position{};
  std::vector<BlobReader::Rows> rows;
};

// What no learnt format has, but one put together by hand might.
Status check(const BlobFormat& format) {
  if (format.bodies.empty() || format.bodies.size() > 2) {
    return Status::error(StatusCode::invalid_argument, "are %zu, not one or two", format.bodies.size()).at("bodies");
  }
  std::int64_t cell_bytes = 0;
  for (std::size_t b = 0; b < format.bodies.size(); ++b) {
    const std::vector<BlobLayer>& layers = format.bodies[b];
    Where where{"layers", b};
    if (layers.empty()) return where.at(Status::error(StatusCode::invalid_argument, "are none"));
    cell_bytes += kCellBytes;
    for (std::size_t l = 0; l < layers.size(); ++l) {
      const BlobLayer& layer = layers[l];
      const BlobLayer& first = format.bodies.front().front();
      where = {"key type", b, "layer", l};
      if (layer.key_type != first.key_type || layer.key_type < 0) {
        return where.at(
            Status::error(StatusCode::mismatch, "is %d, the first layer's %d", layer.key_type, first.key_type));
      }
      if (layer.value_type != first.value_type || layer.value_type < 0) {
        return where.with("value type")
            .at(Status::error(StatusCode::mismatch, "is %d, the first layer's %d", layer.value_type, first.value_type));
      }
      for (const auto& [field, bytes] :
           {std::pair("key row bytes", layer.key_row_bytes), std::pair("value row bytes", layer.value_row_bytes)}) {
        if (bytes < 1 || bytes > kMost32 - cell_bytes) {
          return where.with(field).at(Status::error(StatusCode::out_of_range,
                                                    "%lld bytes, with those before, are none or 2 GiB a cell",
                                                    static_cast<long long>(bytes)));
        }
        cell_bytes += bytes;
      }
      if (format.transposed_values ? layer.value_bytes < 1 || layer.value_row_bytes % layer.value_bytes != 0
                                   : layer.value_bytes != 0) {
        return where.with("value bytes")
            .at(Status::error(StatusCode::invalid_argument, "%d do not make rows of %lld bytes%s", layer.value_bytes,
                              static_cast<long long>(layer.value_row_bytes),
                              format.transposed_values ? "" : " that are not transposed"));
      }
    }
  }
  return {};
}

// Goes through one blob. With a `known` format every field must be as it says; without, `learnt` is what was found.
class Walk {
 public:
  Walk(std::span<const std::byte> blob, const BlobFormat* known) : cursor_(blob), known_(known) {}

  Status blob() {
    KVBLEND_RETURN_IF_ERROR(head());
    const std::size_t most = known_ != nullptr ? known_->bodies.size() : 2;
    do {
      KVBLEND_RETURN_IF_ERROR(body());
    } while (bodies.size() < most && (known_ != nullptr || cursor_.left() > 0));
    if (cursor_.left() == 0) return {};
    return of_blob("end").at(Status::error(StatusCode::corrupt, "%zu bytes are left over", cursor_.left()));
  }

  BlobFormat learnt;
  std::vector<WalkedBody> bodies;

 private:
  Status head() {
    std::int64_t magic = 0;
    if (known_ != nullptr) {
      KVBLEND_RETURN_IF_ERROR(cursor_.expect<std::uint32_t>(known_->magic, of_blob("magic")));
    } else {
      KVBLEND_RETURN_IF_ERROR(
          cursor_.number<std::uint32_t>(magic, 0, (std::numeric_limits<std::uint32_t>::max)(), of_blob("magic")));
      learnt.magic = static_cast<std::uint32_t>(magic);
    }
    return cursor_.number<std::int32_t>(sequence_, 0, kMost32, of_blob("sequence"));
  }

  Status body() {
    const std::size_t b = bodies.size();
    WalkedBody& found = bodies.emplace_back();
    KVBLEND_RETURN_IF_ERROR(cells(b, found));
    if (found.cells == 0) return {};
    if (known_ == nullptr) learnt.bodies.emplace_back();
    KVBLEND_RETURN_IF_ERROR(layer_count(b, found));
    for (std::size_t l = 0; l < found.rows.size(); ++l) KVBLEND_RETURN_IF_ERROR(keys(b, l, found));
    for (std::size_t l = 0; l < found.rows.size(); ++l) KVBLEND_RETURN_IF_ERROR(values(b, l, found));
    return {};
  }

  Status cells(std::size_t b, WalkedBody& found) {
    KVBLEND_RETURN_IF_ERROR(cursor_.expect<std::uint32_t>(1, {"streams", b}));
    std::int64_t count = 0;
    const Where where{"cells", b};
    // An empty sequence is so in all bodies; and a window passes cells, it never adds any.
    const std::int64_t least = known_ == nullptr || (b > 0 && bodies[0].cells > 0) ? 1 : 0;
    const std::int64_t most = b > 0 ? bodies[0].cells : kMost32;
    KVBLEND_RETURN_IF_ERROR(cursor_.number<std::uint32_t>(count, least, most, where));
    if (std::cmp_greater(count * kCellBytes, cursor_.left())) {
      return where.at(Status::error(StatusCode::corrupt, "%lld cannot be in the %zu bytes that follow",
                                    static_cast<long long>(count), cursor_.left()));
    }
    found.cells = static_cast<std::int32_t>(count);
    std::int64_t position = -1;
    for (std::int64_t c = 0; c < count; ++c) {
      const Where cell{"position", b, "cell", static_cast<std::size_t>(c)};
      if (c == 0) {
        KVBLEND_RETURN_IF_ERROR(cursor_.number<std::int32_t>(position, 0, kMost32, cell));
        found.first_position = Position(static_cast<std::int32_t>(position));
      } else {
        KVBLEND_RETURN_IF_ERROR(cursor_.expect<std::int32_t>(++position, cell));
      }
      KVBLEND_RETURN_IF_ERROR(cursor_.expect<std::uint32_t>(1, cell.with("sequences")));
      KVBLEND_RETURN_IF_ERROR(cursor_.expect<std::int32_t>(sequence_, cell.with("sequence")));
    }
    if (b == 0) {
      last_position_ = position;
    } else if (position != last_position_) {
      return Where{"position", b, "cell", static_cast<std::size_t>(count - 1)}.at(
          Status::error(StatusCode::corrupt, "%lld is the last one, in the first body %lld",
                        static_cast<long long>(position), static_cast<long long>(last_position_)));
    }
    return {};
  }

  Status layer_count(std::size_t b, WalkedBody& found) {
    const Where transposed{"values transposed", b};
    const Where where{"layers", b};
    if (known_ != nullptr) {
      KVBLEND_RETURN_IF_ERROR(cursor_.expect<std::uint32_t>(known_->transposed_values ? 1 : 0, transposed));
      KVBLEND_RETURN_IF_ERROR(
          cursor_.expect<std::uint32_t>(static_cast<std::int64_t>(known_->bodies[b].size()), where));
      found.rows.resize(known_->bodies[b].size());
      return {};
    }
    std::int64_t flag = 0;
    if (b == 0) {
      KVBLEND_RETURN_IF_ERROR(cursor_.number<std::uint32_t>(flag, 0, 1, transposed));
      learnt.transposed_values = flag == 1;
    } else {
      KVBLEND_RETURN_IF_ERROR(cursor_.expect<std::uint32_t>(learnt.transposed_values ? 1 : 0, transposed));
    }
    std::int64_t layers = 0;
    KVBLEND_RETURN_IF_ERROR(cursor_.number<std::uint32_t>(layers, 1, kMost32, where));
    if (std::cmp_greater(layers * kLayerBytes, cursor_.left())) {
      return where.at(Status::error(StatusCode::corrupt, "%lld cannot be in the %zu bytes that follow",
                                    static_cast<long long>(layers), cursor_.left()));
    }
    found.rows.resize(static_cast<std::size_t>(layers));
    learnt.bodies[b].resize(static_cast<std::size_t>(layers));
    return {};
  }

  Status keys(std::size_t b, std::size_t l, WalkedBody& found) {
    const Where where{"key type", b, "layer", l};
    std::int64_t type = 0;
    std::int64_t row_bytes = 0;
    if (known_ != nullptr) {
      const BlobLayer& layer = known_->bodies[b][l];
      row_bytes = layer.key_row_bytes;
      KVBLEND_RETURN_IF_ERROR(cursor_.expect<std::int32_t>(layer.key_type, where));
      KVBLEND_RETURN_IF_ERROR(cursor_.expect<std::uint64_t>(row_bytes, where.with("key row bytes")));
    } else {
      KVBLEND_RETURN_IF_ERROR(cursor_.number<std::int32_t>(type, 0, kMost32, where));
      KVBLEND_RETURN_IF_ERROR(cursor_.number<std::uint64_t>(row_bytes, 1, kMost32, where.with("key row bytes")));
      learnt.bodies[b][l].key_type = static_cast<std::int32_t>(type);
      learnt.bodies[b][l].key_row_bytes = row_bytes;
    }
    return rows(row_bytes, found, found.rows[l].keys, where.with("key rows"));
  }

  Status values(std::size_t b, std::size_t l, WalkedBody& found) {
    const Where where{"value type", b, "layer", l};
    const Where row_where = where.with("value row bytes");
    const Where bytes_where = where.with("value bytes");
    const Where count_where = where.with("values a row");
    std::int64_t row_bytes = 0;
    if (known_ != nullptr) {
      const BlobLayer& layer = known_->bodies[b][l];
      row_bytes = layer.value_row_bytes;
      KVBLEND_RETURN_IF_ERROR(cursor_.expect<std::int32_t>(layer.value_type, where));
      if (known_->transposed_values) {
        KVBLEND_RETURN_IF_ERROR(cursor_.expect<std::uint32_t>(layer.value_bytes, bytes_where));
        KVBLEND_RETURN_IF_ERROR(cursor_.expect<std::uint32_t>(row_bytes / layer.value_bytes, count_where));
      } else {
        KVBLEND_RETURN_IF_ERROR(cursor_.expect<std::uint64_t>(row_bytes, row_where));
      }
    } else {
      std::int64_t type = 0;
      KVBLEND_RETURN_IF_ERROR(cursor_.number<std::int32_t>(type, 0, kMost32, where));
      BlobLayer& layer = learnt.bodies[b][l];
      layer.value_type = static_cast<std::int32_t>(type);
      if (learnt.transposed_values) {
        std::int64_t value_bytes = 0;
        std::int64_t count = 0;
        KVBLEND_RETURN_IF_ERROR(cursor_.number<std::uint32_t>(value_bytes, 1, kMost32, bytes_where));
        KVBLEND_RETURN_IF_ERROR(cursor_.number<std::uint32_t>(count, 1, kMost32 / value_bytes, count_where));
        layer.value_bytes = static_cast<std::int32_t>(value_bytes);
        row_bytes = value_bytes * count;
      } else {
        KVBLEND_RETURN_IF_ERROR(cursor_.number<std::uint64_t>(row_bytes, 1, kMost32, row_where));
      }
      layer.value_row_bytes = row_bytes;
    }
    return rows(row_bytes, found, found.rows[l].values, where.with("value rows"));
  }

  // Cells and the bytes of a row are below 2^31 each.
  Status rows(std::int64_t row_bytes, const WalkedBody& found, const std::byte*& start, const Where& where) {
    return cursor_.skip(static_cast<std::uint64_t>(found.cells) * static_cast<std::uint64_t>(row_bytes), start, where);
  }

  Cursor cursor_;
  const BlobFormat* known_;
  std::int64_t sequence_ = 0;
  std::int64_t last_position_ = 0;  // of the first body
};

// Writes one field after another, and leaves room for rows.
class Pen {
 public:
  explicit Pen(std::byte* at) : at_(at) {}

  template <class T>
  void put(T value) {
    std::memcpy(at_, &value, sizeof value);
    at_ += sizeof value;
  }
  std::byte* room(std::int64_t bytes) { return std::exchange(at_, at_ + bytes); }

 private:
  std::byte* at_;
};

template <class T>
const T* find(const std::vector<T>& list, std::int32_t index) {
  return index >= 0 && std::cmp_less(index, list.size()) ? &list[static_cast<std::size_t>(index)] : nullptr;
}

}  // namespace

Result<BlobFormat> BlobFormat::learn(std::span<const std::byte> blob) {
  Walk walk(blob, nullptr);
  KVBLEND_RETURN_IF_ERROR(walk.blob());
  KVBLEND_RETURN_IF_ERROR(check(walk.learnt));
  return std::move(walk.learnt);
}

std::int64_t BlobFormat::bytes(std::int32_t cells) const {
  std::int64_t sum = kHeadBytes;
  for (const std::vector<BlobLayer>& layers : bodies) {
    sum += kCountBytes;
    if (cells == 0) continue;
    sum += cells * kCellBytes + kLayersBytes;
    for (const BlobLayer& layer : layers) sum += kLayerBytes + cells * (layer.key_row_bytes + layer.value_row_bytes);
  }
  return sum;
}

void BlobWriter::Unmap::operator()(std::byte* memory) const { ::munmap(memory, size); }

Status BlobWriter::lay_out(const BlobFormat& format, std::int32_t cells, Position first_position) {
  KVBLEND_RETURN_IF_ERROR(check(format));
  if (cells < 1) return Status::error(StatusCode::invalid_argument, "are %d, not at least one", cells).at("cells");
  if (first_position.value < 0 || first_position.value > kMost32 - (cells - 1)) {
    return Status::error(StatusCode::out_of_range, "%d is not one, or not with %d cells", first_position.value, cells)
        .at("first position");
  }
  const auto size = static_cast<std::size_t>(format.bytes(cells));
  if (size > memory_.get_deleter().size) {
    // Zeroed by the system, in huge pages where it has them, since all of it is written and read once a request.
    void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      return Status::error(StatusCode::insufficient_space, "no memory for %zu bytes", size).at("cells");
    }
#if defined(MADV_HUGEPAGE)
    ::madvise(memory, size, MADV_HUGEPAGE);
#endif
    memory_ = {static_cast<std::byte*>(memory), Unmap(size)};
  }
  size_ = size;
  cells_ = cells;
  rows_.resize(format.bodies.size());

  Pen pen(memory_.get());
  pen.put(format.magic);
  pen.put(std::int32_t{0});
  for (std::size_t b = 0; b < rows_.size(); ++b) {
    const std::vector<BlobLayer>& layers = format.bodies[b];
    rows_[b].resize(layers.size());
    pen.put(std::uint32_t{1});
    pen.put(static_cast<std::uint32_t>(cells));
    for (std::int32_t c = 0; c < cells; ++c) {
      pen.put((first_position + c).value);
      pen.put(std::uint32_t{1});
      pen.put(std::int32_t{0});
    }
    pen.put(std::uint32_t{format.transposed_values ? 1U : 0U});
    pen.put(static_cast<std::uint32_t>(layers.size()));
    for (std::size_t l = 0; l < layers.size(); ++l) {
      pen.put(layers[l].key_type);
      pen.put(static_cast<std::uint64_t>(layers[l].key_row_bytes));
      rows_[b][l].keys = pen.room(cells * layers[l].key_row_bytes);
    }
    for (std::size_t l = 0; l < layers.size(); ++l) {
      pen.put(layers[l].value_type);
      if (format.transposed_values) {
        pen.put(static_cast<std::uint32_t>(layers[l].value_bytes));
        pen.put(static_cast<std::uint32_t>(layers[l].value_row_bytes / layers[l].value_bytes));
      } else {
        pen.put(static_cast<std::uint64_t>(layers[l].value_row_bytes));
      }
      rows_[b][l].values = pen.room(cells * layers[l].value_row_bytes);
    }
  }
  return {};
}

BlobRows BlobWriter::rows(std::int32_t body, std::int32_t layer) const {
  const std::vector<BlobRows>* layers = find(rows_, body);
  const BlobRows* rows = layers != nullptr ? find(*layers, layer) : nullptr;
  return rows != nullptr ? *rows : BlobRows{};
}

Result<BlobReader> BlobReader::open(const BlobFormat& format, std::span<const std::byte> blob) {
  KVBLEND_RETURN_IF_ERROR(check(format));
  Walk walk(blob, &format);
  KVBLEND_RETURN_IF_ERROR(walk.blob());
  BlobReader reader;
  for (WalkedBody& body : walk.bodies) {
    reader.bodies_.push_back({body.cells, body.first_position, std::move(body.rows)});
  }
  return reader;
}

std::int32_t BlobReader::cells(std::int32_t body) const {
  const Body* found = find(bodies_, body);
  return found != nullptr ? found->cells : 0;
}

Position BlobReader::first_position(std::int32_t body) const {
  const Body* found = find(bodies_, body);
  return found != nullptr ? found->first_position : Position{};
}

BlobReader::Rows BlobReader::rows(std::int32_t body, std::int32_t layer) const {
  const Body* found = find(bodies_, body);
  const Rows* rows = found != nullptr ? find(found->rows, layer) : nullptr;
  return rows != nullptr ? *rows : Rows{};
}

}  // namespace llama_cpp
