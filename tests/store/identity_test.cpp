// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What makes two chunks the same, and what a digest has to do with it.
#include "fixtures.hpp"

#include <limits>
#include <set>

using namespace kvblend_test;

namespace {

struct Variation {
  const char* field;
  void (*apply)(ChunkIdentity&);
};

const Variation kVariations[] = {
    {"model.name", [](ChunkIdentity& id) { id.model.name = "other"; }},
    {"model.fingerprint", [](ChunkIdentity& id) { id.model.fingerprint = "ffff"; }},
    {"model.dtype", [](ChunkIdentity& id) { id.model.dtype = DType::bf16; }},
    {"model.kv_heads", [](ChunkIdentity& id) { id.model.kv_heads = 3; }},
    {"tenant", [](ChunkIdentity& id) { id.tenant = "bob"; }},
    {"recipe", [](ChunkIdentity& id) { id.recipe = "saliency"; }},
    {"rope of layer 1", [](ChunkIdentity& id) { id.layer_rope[1] = 0; }},
    {"rope of layer 0", [](ChunkIdentity& id) { id.ropes[0].pairing = RopePairing::interleaved; }},
    {"rope of layer 0", [](ChunkIdentity& id) { id.ropes[0].inv_freq[1] *= 1.0 + 1e-15; }},
    {"rope of layer 0", [](ChunkIdentity& id) { id.ropes[0].attention_factor = 1.1; }},
    {"rope of layer 0", [](ChunkIdentity& id) { id.ropes[0].axis_of_pair[1] = 2; }},
    {"tokens[2]", [](ChunkIdentity& id) { id.tokens[2] = 9; }},
    {"tokens", [](ChunkIdentity& id) { id.tokens.push_back(4); }},
    {"context", [](ChunkIdentity& id) { id.context.push_back(4); }},
    {"first_position", [](ChunkIdentity& id) { id.first_position = Position(1); }},
};

}  // namespace

TEST_CASE("an identity differs in each of its fields, and the mismatch names the field") {
  const ChunkIdentity identity = small_identity({1, 2, 3}, DType::f16);
  REQUIRE(validate(identity).ok());
  CHECK(identity == small_identity({1, 2, 3}, DType::f16));
  for (const Variation& variation : kVariations) {
    CAPTURE(variation.field);
    ChunkIdentity other = identity;
    variation.apply(other);
    const Status status = check_same(identity, other);
    CHECK(status.code() == StatusCode::mismatch);
    CHECK(std::string(status.where()) == variation.field);
    CHECK_FALSE(identity == other);
    CHECK(digest_of(identity) != digest_of(other));
  }
}

TEST_CASE("a shape of another model is named") {
  ChunkIdentity identity = small_identity({1});
  ModelIdentity other = identity.model;
  other.layers = 5;
  CHECK(std::string(check_same(identity.model, other).where()) == "model.layers");
  other = identity.model;
  other.head_dim = 8;
  CHECK(std::string(check_same(identity.model, other).where()) == "model.head_dim");
}

TEST_CASE("another tenant's name is not told") {
  ChunkIdentity identity = small_identity({1});
  ChunkIdentity other = identity;
  other.tenant = "secret";
  CHECK_FALSE(says(check_same(identity, other), "secret"));
}

TEST_CASE("how ropes are listed does not matter, only which layer has which") {
  const ChunkIdentity identity = small_identity({1, 2});
  ChunkIdentity other = identity;
  std::swap(other.ropes[0], other.ropes[1]);
  other.layer_rope = {1, 0};
  CHECK(identity == other);
  CHECK(digest_of(identity) == digest_of(other));
  other.ropes[0].inv_freq[100] = 3.0;  // behind the frequencies in use
  CHECK(identity == other);
  CHECK(digest_of(identity) == digest_of(other));
}

TEST_CASE("fields do not run into each other in the digest") {
  ChunkIdentity a = small_identity({1, 2, 3});
  ChunkIdentity b = a;
  a.model.name = "ab";
  a.model.fingerprint = "c";
  b.model.name = "a";
  b.model.fingerprint = "bc";
  CHECK(digest_of(a) != digest_of(b));
  a = small_identity({1, 2, 3});
  b = small_identity({1, 2});
  b.context = {3};
  CHECK(digest_of(a) != digest_of(b));
}

TEST_CASE("digests of many small identities are all different") {
  std::set<ChunkDigest> digests;
  for (TokenId first = 0; first < 40; ++first) {
    for (TokenId second = 0; second < 40; ++second) digests.insert(digest_of(small_identity({first, second})));
  }
  CHECK(digests.size() == 1600);
}

TEST_CASE("add_layer_rope keeps each rope once") {
  ChunkIdentity identity;
  RopeSpec none;
  none.head_dim = 4;
  identity.add_layer_rope(small_rope(4));
  identity.add_layer_rope(none);
  identity.add_layer_rope(small_rope(4));
  CHECK(identity.ropes.size() == 2);
  CHECK(identity.layer_rope == std::vector<std::int32_t>{0, 1, 0});
  CHECK(identity.rope(1).rotary_dim == 0);
}

TEST_CASE("impossible identities are refused by field") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto refused = [](auto&& change) {
    ChunkIdentity identity = small_identity({1, 2, 3});
    change(identity);
    const Status status = validate(identity);
    CHECK(status.code() == StatusCode::invalid_argument);
    return std::string(status.where());
  };
  CHECK(refused([](ChunkIdentity& id) { id.model.name.clear(); }) == "model.name");
  CHECK(refused([](ChunkIdentity& id) { id.model.layers = 0; }) == "model.layers");
  CHECK(refused([](ChunkIdentity& id) { id.model.layers = 1 << 30; }) == "model.layers");
  CHECK(refused([](ChunkIdentity& id) { id.model.kv_heads = -1; }) == "model.kv_heads");
  CHECK(refused([](ChunkIdentity& id) { id.model.head_dim = 2048; }) == "model.head_dim");
  CHECK(refused([](ChunkIdentity& id) { id.model.dtype = static_cast<DType>(77); }) == "model.dtype");
  for (const DType blocks : {DType::q8_0, DType::q4_0}) {
    ChunkIdentity identity = small_identity({1}, blocks);
    CHECK(validate(identity).ok());
    identity.model.head_dim = 48;
    CHECK(std::string(validate(identity).where()) == "model.head_dim");
    CHECK(says(validate(identity), to_string(blocks)));
  }
  CHECK(refused([](ChunkIdentity& id) { id.model.head_dim = 8; }) == "ropes[0]");
  CHECK(refused([](ChunkIdentity& id) { id.ropes[1].rotary_dim = 3; }) == "ropes[1]");
  CHECK(refused([](ChunkIdentity& id) { id.ropes[1].rotary_offset = 2; }) == "ropes[1]");
  CHECK(refused([nan](ChunkIdentity& id) { id.ropes[1].inv_freq[0] = nan; }) == "ropes[1]");
  CHECK(refused([nan](ChunkIdentity& id) { id.ropes[1].attention_factor = nan; }) == "ropes[1]");
  CHECK(refused([](ChunkIdentity& id) { id.layer_rope.pop_back(); }) == "layer_rope");
  CHECK(refused([](ChunkIdentity& id) { id.layer_rope[1] = 2; }) == "layer_rope[1]");
  CHECK(refused([](ChunkIdentity& id) { id.first_position = Position(-1); }) == "first_position");
  CHECK(refused([](ChunkIdentity& id) { id.first_position = Position(0x7fffffff); }) == "tokens");
}
