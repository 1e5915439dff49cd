// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Fuzzes can_shift, RopeShifter and copy_rows with specs, runs, views, tables, scales and scratch of any kind, and the
// functions that make layouts (layout_calls.hpp). What is asked of every call: it returns an error that names a field
// and leaves the destination as it was, or it succeeds and writes nothing but the rows it was given. Sanitizers see to
// the rest: views cover exactly the memory that is there.
#include "bytes.hpp"
#include "layout_calls.hpp"
#include "views.hpp"

#include <kvblend/codec/ds_mla.hpp>
#include <kvblend/codec/floats.hpp>
#include <kvblend/codec/fp8.hpp>
#include <kvblend/codec/ggml_blocks.hpp>
#include <kvblend/codec/hadamard.hpp>
#include <kvblend/codec/scaled.hpp>
#include <kvblend/eigen/backend.hpp>
#include <kvblend/fuse/portable_backend.hpp>
#include <kvblend/memory/plane.hpp>
#include <kvblend/memory/rows.hpp>
#include <kvblend/rope/can_shift.hpp>
#include <kvblend/rope/shifter.hpp>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

namespace fuzz {
namespace {

using namespace kvblend;

template <class... C>
struct Codecs {};

using Turned8 = HadamardCodec<Q8_0Codec, 64>;
using Turned4 = HadamardCodec<Q4_0Codec, 128>;
using OneScale = Scaled<Fp8E4M3Codec, TensorScale>;
using ScalePerHead = Scaled<Fp8E5M2Codec, HeadScales>;
using ScalePerToken = Scaled<Fp8E4M3Codec, TokenScales<AnyLayout>>;
using GivenPerToken = Scaled<Q8_0Codec, TokenScales<AnyLayout, const std::byte>>;
using AllCodecs = Codecs<F32Codec, F16Codec, Bf16Codec, Fp8E4M3Codec, Q8_0Codec, Turned8, OneScale, ScalePerToken,
                         Q4_0Codec, Fp8E5M2Codec, ScalePerHead, Turned4, GivenPerToken, DsMlaLatentCodec>;

template <Codec C>
constexpr Format format_of() {
  return {C::block_values, C::block_bytes};
}

// Runs the rows in blocks from the last to the first.
struct LastFirst {
  template <class Body>
  void parallel_for(std::int64_t count, const Body& body) const {
    for (std::int64_t i = count; i-- > 0;) body(i);
  }
};

struct AnyMover {
  bool eigen = false;

  template <ReadablePlane P, WritablePlane Q>
  void shift(const RopeSpec& spec, const RotationTable& table, const ShiftRun& run, const P& source,
             const Q& destination) const {
    if (eigen) {
      EigenBackend<LastFirst>().shift(spec, table, run, source, destination);
    } else {
      PortableBackend().shift(spec, table, run, source, destination);
    }
  }
};

// What a case does, but for the memory it does it in.
struct Call {
  RopeSpec stored;
  RopeSpec wanted;
  ShiftRun run;
  bool listed = false;
  bool engine_angles = false;
  bool eigen = false;
  bool in_place = false;
  std::vector<AxisPositions> old_positions;
  std::vector<AxisPositions> new_positions;
};

void break_spec(Bytes& in, RopeSpec& spec) {
  for (std::int32_t faults = in.below(3); faults > 0; --faults) {
    const auto pair = static_cast<std::size_t>(in.take<std::uint16_t>()) % kMaxRopePairs;
    switch (in.below(7)) {
      case 0: spec.head_dim = in.odd32(); break;
      case 1: spec.rotary_dim = in.odd32(); break;
      case 2: spec.rotary_offset = in.odd32(); break;
      case 3: spec.pairing = static_cast<RopePairing>(in.byte()); break;
      case 4: spec.attention_factor = in.take<double>(); break;
      case 5: spec.inv_freq[pair % (in.flag() ? 8 : kMaxRopePairs)] = in.take<double>(); break;
      default: spec.axis_of_pair[pair % (in.flag() ? 8 : kMaxRopePairs)] = in.byte(); break;
    }
  }
}

RopeSpec take_spec(Bytes& in) {
  constexpr std::int32_t kDims[] = {64, 128, 32, 96, 80, 256, 512, 576, 1024, 16, 8, 2, 1, 7, 33, 640};
  RopeSpec spec;
  spec.head_dim = kDims[in.byte() % 16];
  const std::int32_t part = in.below(4);
  spec.rotary_dim = part < 2 ? spec.head_dim : part == 2 ? spec.head_dim / 2 : in.byte();
  spec.rotary_offset = spec.rotary_dim < spec.head_dim ? in.byte() % (spec.head_dim - spec.rotary_dim + 1) : 0;
  spec.pairing = in.flag() ? RopePairing::interleaved : RopePairing::neox;
  const double base = 2.0 + in.take<std::uint16_t>();
  for (std::size_t i = 0; i < spec.inv_freq.size(); ++i) {
    spec.inv_freq[i] = std::pow(base, -static_cast<double>(i) / 64);
    spec.axis_of_pair[i] = static_cast<std::uint8_t>(part == 1 ? i % 3 : 0);
  }
  if (in.seldom()) break_spec(in, spec);
  return spec;
}

std::vector<AxisPositions> take_positions(Bytes& in, std::int32_t count) {
  std::vector<AxisPositions> positions(static_cast<std::size_t>((std::clamp)(in.mostly(count), 0, 64)));
  for (AxisPositions& token : positions) {
    for (std::int32_t& position : token.axis) position = in.flag() ? in.mostly(in.byte()) : in.byte();
  }
  return positions;
}

Call take_call(Bytes& in) {
  Call call;
  call.stored = take_spec(in);
  call.wanted = call.stored;
  if (in.below(4) == 0) break_spec(in, call.wanted);
  call.run.count = in.mostly(in.flag() ? in.below(40) : in.byte());
  call.run.source = in.mostly(in.below(8));
  call.run.destination = Row(in.mostly(in.below(8)));
  call.run.old_first = Position(in.odd32());
  call.run.new_first = in.below(4) == 0 ? call.run.old_first : Position(in.odd32());
  const std::uint8_t how = in.byte();
  call.listed = (how & 3) == 3;
  call.engine_angles = (how & 4) != 0;
  call.eigen = (how & 8) != 0;
  call.in_place = (how & 0x30) == 0x30;
  if (call.listed) {
    call.old_positions = take_positions(in, call.run.count);
    call.new_positions = in.flag() ? call.old_positions : take_positions(in, call.run.count);
  }
  return call;
}

// Scales beside a plane, and the memory they are in.
struct Scales {
  std::unique_ptr<float[]> of_heads;
  View view;
  Memory memory;
  bool made = false;
};

constexpr Format kScaleFormat{1, 4};

float take_scale(Bytes& in) { return in.seldom() ? in.take<float>() : 0.01f * (1 + static_cast<float>(in.byte())); }

// Scales for all rows of `plane` in the ranges, or for a plane that the shifter must refuse for its lack of scales.
bool take_token_scales(Bytes& in, const View& plane, std::initializer_list<RowRange> ranges, Scales& scales) {
  const std::int32_t heads = in.mostly(in.flag() ? 1 : plane.pool.head_count);
  const std::int32_t values = in.seldom() ? in.odd32() : 1;
  std::optional<View> view = take_view(in, heads, values, kScaleFormat);
  const bool made = view.has_value();  // it may lack rows that the plane has
  if (made) {
    std::int64_t end = 0;
    for (const RowRange& range : ranges) end = (std::max)(end, range.first + range.count);
    limit_rows(*view, end);
  } else {
    view.emplace();
    view->pool = BlockPool(1, 1, HeadShape(heads, values, 4), 0, detail::product(heads, 4));
    view->rows = std::int64_t{1} << 32;
    view->layout.contiguous = ContiguousLayout(view->rows, view->pool, view->pool.row_stride);
  }
  if (values == 1) view->pool.tile_size = 1;  // what else the layout has there means nothing
  Extent extent;
  const bool needed = heads == 1 || heads == plane.pool.head_count;  // else refused
  for (const RowRange& range : ranges) {
    if (needed) extent.add(*view, range, kScaleFormat);
  }
  if (!extent.fits()) return false;
  scales.view = std::move(*view);
  scales.memory = Memory(in, extent);
  scales.made = true;
  return true;
}

// The codec of `plane`, with scales if it has any; none where they would need too much memory.
template <Codec C>
std::optional<C> take_codec(Bytes& in, const View& plane, std::initializer_list<RowRange> ranges, Scales& scales) {
  const bool missing = in.seldom();
  if constexpr (std::same_as<C, OneScale>) {
    return missing ? C{} : C(TensorScale{take_scale(in)});
  } else if constexpr (std::same_as<C, ScalePerHead>) {
    const std::int32_t count = in.mostly(plane.pool.head_count);
    if (count > 1024) return std::nullopt;
    scales.of_heads = std::make_unique<float[]>(static_cast<std::size_t>((std::max)(count, 0)));
    for (std::int32_t i = 0; i < count; ++i) scales.of_heads[static_cast<std::size_t>(i)] = take_scale(in);
    return C(HeadScales{missing ? nullptr : scales.of_heads.get(), count});
  } else if constexpr (std::same_as<C, ScalePerToken> || std::same_as<C, GivenPerToken>) {
    if (missing) return C{};
    if (!take_token_scales(in, plane, ranges, scales)) return std::nullopt;
    C codec;
    codec.scales.base = scales.memory.base();
    codec.scales.layout = scales.view.layout;
    return codec;
  } else {
    return C{};
  }
}

template <Codec From, Codec To, class Angles>
Status shift(const Call& call, const Plane<From, AnyLayout, const std::byte>& source,
             const Plane<To, AnyLayout>& destination, std::span<float> scratch) {
  const RopeShifter<Angles, AnyMover> shifter(AnyMover{call.eigen});
  if (!call.listed) return shifter.shift(call.stored, call.wanted, call.run, source, destination, scratch);
  return shifter.shift(call.stored, call.wanted, {call.run.destination, call.run.source, call.run.count},
                       call.old_positions, call.new_positions, source, destination, scratch);
}

template <Codec From, Codec To>
Status check(const Call& call, const Plane<From, AnyLayout, const std::byte>& source,
             const Plane<To, AnyLayout>& destination) {
  using Shifter = RopeShifter<>;
  if (!call.listed) return Shifter::check(call.stored, call.wanted, call.run, source, destination);
  return Shifter::check(call.stored, call.wanted, {call.run.destination, call.run.source, call.run.count},
                        call.old_positions, call.new_positions, source, destination);
}

// The views, their codecs and the memory under them.
template <Codec From, Codec To>
struct Stage {
  View source_view;
  View destination_view;
  Scales source_scales;
  Scales destination_scales;
  Memory source_memory;
  Memory destination_memory;
  Plane<From, AnyLayout, const std::byte> source;
  Plane<To, AnyLayout> destination;

  const View& from() const { return in_place ? destination_view : source_view; }
  bool in_place = false;
};

// False where the input describes something that needs more memory or time than a fuzzer has.
template <Codec From, Codec To>
bool set_up(Bytes& in, const Call& call, Stage<From, To>& stage) {
  const RowRange read{call.run.source, (std::min)(call.run.count, 4096)};
  const RowRange written{call.run.destination.value, (std::min)(call.run.count, 4096)};
  const std::int32_t heads = in.mostly(1 + in.below(6));
  // One number a statement: compilers differ in the order of arguments, and a corpus is to mean the same to all.
  std::int32_t own_heads = in.mostly(heads);
  std::int32_t own_head_dim = in.mostly(call.stored.head_dim);
  std::optional<View> view = take_view(in, own_heads, own_head_dim, format_of<To>());
  if (!view) return false;
  stage.destination_view = std::move(*view);
  if constexpr (std::same_as<From, To>) stage.in_place = call.in_place;
  if (!stage.in_place) {
    own_heads = in.mostly(heads);
    own_head_dim = in.mostly(call.stored.head_dim);
    view = take_view(in, own_heads, own_head_dim, format_of<From>());
    if (!view) return false;
    stage.source_view = std::move(*view);
  }
  for (View* each : {&stage.source_view, &stage.destination_view}) {
    if (call.run.count > 2048) limit_rows(*each, 2048);
    if (each->has_shape(format_of<From>()) || each->has_shape(format_of<To>())) {
      const Wide values = Wide{(std::min)(call.run.count, 2048)} * each->pool.head_count * each->pool.head_values;
      if (values > (Wide{1} << 18)) return false;
    }
  }

  Extent reads;
  Extent writes;
  writes.add(stage.destination_view, written, format_of<To>());
  (stage.in_place ? writes : reads).add(stage.from(), read, format_of<From>());
  if (!reads.fits() || !writes.fits()) return false;
  stage.destination_memory = Memory(in, writes);
  stage.source_memory = Memory(in, reads);

  const auto to = take_codec<To>(in, stage.destination_view, {written, read}, stage.destination_scales);
  if (!to) return false;
  stage.destination =
      Plane<To, AnyLayout>(in.seldom() ? nullptr : stage.destination_memory.base(), stage.destination_view.layout, *to);
  if constexpr (std::same_as<From, To>) {
    if (stage.in_place) {
      stage.source = stage.destination;
      return true;
    }
  }
  const auto from = take_codec<From>(in, stage.source_view, {read}, stage.source_scales);
  if (!from) return false;
  stage.source = Plane<From, AnyLayout, const std::byte>(in.seldom() ? nullptr : stage.source_memory.base(),
                                                         stage.source_view.layout, *from);
  return true;
}

// Rows that the call was given may be written, and so may the scales that writing them makes.
template <Codec From, Codec To>
void open_rows(const Call& call, Stage<From, To>& stage) {
  for (std::int32_t i = 0; i < call.run.count; ++i) {
    const std::int64_t row = std::int64_t{call.run.destination.value} + i;
    if (stage.from().find(std::int64_t{call.run.source} + i) != RowState::present) continue;
    if (stage.destination_view.find(row) != RowState::present) continue;
    stage.destination_memory.open(stage.destination_view, row, format_of<To>());
    if constexpr (SelfScalingCodec<To>)
      stage.destination_scales.memory.open(stage.destination_scales.view, row, kScaleFormat);
  }
}

template <Codec From, Codec To>
void move(Bytes& in, const Call& call) {
  Stage<From, To> stage;
  if (!set_up(in, call, stage)) return;
  for (std::int32_t i = 0; i < 4; ++i) {
    compare_row(stage.destination_view, in.odd64(), false);
    compare_row(stage.from(), in.odd64(), false);
  }

  const Status checked = check(call, stage.source, stage.destination);
  const bool accepted = is_ok(checked);
  stage.destination_memory.check();
  if (accepted) {
    require(stage.from().has_shape(format_of<From>()) && stage.destination_view.has_shape(format_of<To>()),
            "planes that are accepted have a shape");
    for (std::int32_t i = 0; i < call.run.count; ++i) {
      compare_row(stage.from(), std::int64_t{call.run.source} + i, true);
      compare_row(stage.destination_view, std::int64_t{call.run.destination.value} + i, true);
    }
  }

  const std::uint8_t what = in.byte();
  if (accepted && what >= 232 && call.run.count > 0) {
    copy_row(stage.source, call.run.source, stage.destination, call.run.destination.value);
    Call one = call;
    one.run.count = 1;
    open_rows(one, stage);
  } else if (accepted && what >= 192) {
    copy_rows(stage.source, call.run.source, stage.destination, call.run.destination.value, call.run.count);
    open_rows(call, stage);
  } else {
    const std::int64_t least = RopeShifter<>::least_scratch(call.wanted);
    const std::int64_t rows = (std::clamp)(call.run.count, 0, 2048);
    const bool sensible = least >= 0 && least <= 1024;
    const std::int64_t room = !sensible || what % 4 == 3 ? in.byte() * 9 : what % 4 == 2 ? least : least * rows;
    std::vector<float> scratch(static_cast<std::size_t>(room));
    const Status status = call.engine_angles
                              ? shift<From, To, EngineAngles>(call, stage.source, stage.destination, scratch)
                              : shift<From, To, ExactAngles>(call, stage.source, stage.destination, scratch);
    const bool done = is_ok(status);
    require(!done || accepted, "shift refuses what check refuses", checked.message());
    require(done || !accepted || status.code() == StatusCode::insufficient_space, "shift does what check accepts",
            status.message());
    require(done || !accepted || room < least, "the least scratch is enough", status.message());
    require(accepted || std::strcmp(status.where(), checked.where()) == 0, "shift and check name the same field");
    if (done) open_rows(call, stage);
  }
  stage.destination_memory.check();
  stage.destination_scales.memory.check();
  stage.source_memory.check();
  stage.source_scales.memory.check();
}

// The pairs that are tried: each codec with itself, with the one after it in the list, and from and to plain floats.
template <class... C>
void move_any(Bytes& in, const Call& call, Codecs<C...>) {
  using Move = void (*)(Bytes&, const Call&);
  constexpr std::size_t kCount = sizeof...(C);
  constexpr Move kSame[] = {&move<C, C>...};
  constexpr Move kToFloats[] = {&move<C, F32Codec>...};
  constexpr Move kFromFloats[] = {&move<F16Codec, C>...};
  const std::size_t which = in.byte() % kCount;
  switch (in.below(4)) {
    case 0: kToFloats[which](in, call); return;
    case 1: kFromFloats[which](in, call); return;
    default: kSame[which](in, call); return;
  }
}

void shift_any(Bytes& in) {
  const Call call = take_call(in);
  const Result<ShiftKind> kind = can_shift(call.stored, call.wanted);
  if (is_ok(kind.status)) {
    require((kind.value == ShiftKind::copy) == (call.stored.rotary_dim == 0), "keys without rope are copied");
    is_ok(can_shift(call.stored, call.wanted, call.run).status);
    const std::int64_t size = RopeShifter<>::scratch_size(call.stored, call.wanted, call.run);
    require(size >= 0 && size <= Wide{call.wanted.rotary_dim} * (std::max)(call.run.count, 0), "scratch is bounded");
  }
  is_ok(validate(call.stored));
  move_any(in, call, AllCodecs{});
}

}  // namespace
}  // namespace fuzz

// An input is some calls, each with the number of its bytes before it, so that a small corpus holds many.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  constexpr int kMostCalls = 32;
  for (int calls = 0; calls < kMostCalls && size > 0; ++calls) {
    const std::size_t length = (std::min)(std::size_t{data[0]}, size - 1);
    fuzz::Bytes in(data + 1, length);
    data += 1 + length;
    size -= 1 + length;
    if (in.byte() % 8 == 7) {
      fuzz::call_layouts(in);
    } else {
      fuzz::shift_any(in);
    }
  }
  return 0;
}
