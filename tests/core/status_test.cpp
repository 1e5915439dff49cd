// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Status carries its text, never overruns it, and outlives what it speaks of.
#include <kvblend/core/status.hpp>

#include <doctest/doctest.h>
#include <cstring>
#include <string>
#include <utility>

using namespace kvblend;

namespace {

Status fails_if(bool wrong) {
  if (wrong) return Status::error(StatusCode::mismatch, "heads: %d, not %d", 2, 4).at("layer %d", 7);
  return {};
}
Status passes_on(bool wrong) {
  KVBLEND_RETURN_IF_ERROR(fails_if(wrong));
  return Status::error(StatusCode::cancelled, "reached the end");
}
Result<int> half_of(int number) {
  if (number % 2 != 0) return Status::error(StatusCode::invalid_argument, "%d is odd", number).at("number");
  return number / 2;
}

}  // namespace

TEST_CASE("a status is ok and empty unless it says otherwise") {
  const Status status;
  CHECK(status.ok());
  CHECK(status.code() == StatusCode::ok);
  CHECK(std::string(status.message()).empty());
  CHECK(std::string(status.where()).empty());
}

TEST_CASE("an error names its place and its cause") {
  const Status status = fails_if(true);
  CHECK_FALSE(status.ok());
  CHECK(status.code() == StatusCode::mismatch);
  CHECK(std::string(status.message()) == "heads: 2, not 4");
  CHECK(std::string(status.where()) == "layer 7");
  CHECK(std::string(to_string(status.code())) == "mismatch");
}

TEST_CASE("the text is a copy and survives its sources") {
  Status copy;
  {
    std::string name = "chunk of a string that goes away";
    copy = Status::error(StatusCode::not_found, "%s", name.c_str()).at("%s", name.c_str());
    name.assign(name.size(), '#');
  }
  const Status moved = std::move(copy);
  CHECK(std::string(moved.message()) == "chunk of a string that goes away");
  CHECK(std::string(moved.where()) == "chunk of a string that goes away");
}

TEST_CASE("long text is cut and still ends") {
  const std::string text(5000, 'x');
  const Status status = Status::error(StatusCode::io_error, "%s", text.c_str()).at("%s", text.c_str());
  CHECK(std::strlen(status.message()) > 100);
  CHECK(std::strlen(status.message()) < 300);
  CHECK(std::strlen(status.where()) > 30);
  CHECK(std::strlen(status.where()) < 100);
  CHECK(text.compare(0, std::strlen(status.message()), status.message()) == 0);
}

TEST_CASE("an error returns from the enclosing function") {
  CHECK(passes_on(true).code() == StatusCode::mismatch);
  CHECK(passes_on(false).code() == StatusCode::cancelled);
}

TEST_CASE("a result holds a value or the reason for none") {
  CHECK(half_of(8).ok());
  CHECK(half_of(8).value == 4);
  CHECK_FALSE(half_of(7).ok());
  CHECK(std::string(half_of(7).status.message()) == "7 is odd");
}

TEST_CASE("every code has a name of its own") {
  for (int a = 0; a <= static_cast<int>(StatusCode::cancelled); ++a) {
    CHECK(std::string(to_string(static_cast<StatusCode>(a))) != "unknown");
    for (int b = 0; b < a; ++b) {
      CHECK(std::string(to_string(static_cast<StatusCode>(a))) != to_string(static_cast<StatusCode>(b)));
    }
  }
  CHECK(std::string(to_string(static_cast<StatusCode>(99))) == "unknown");
}
