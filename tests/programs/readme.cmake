# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# The README shows the example that is built and run, to the letter.
file(READ "${SOURCE}/README.md" readme)
file(READ "${SOURCE}/examples/integration/main.cpp" example)
string(FIND "${example}" "#include" start)
string(SUBSTRING "${example}" ${start} -1 example)
string(STRIP "${example}" example)
string(FIND "${readme}" "```cpp\n${example}\n```" at)
if(at EQUAL -1)
  message(FATAL_ERROR "README.md does not hold examples/integration/main.cpp")
endif()
