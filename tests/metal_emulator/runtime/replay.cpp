// Runs one recorded launch in a process of its own, where a sanitizer can watch it: replay <job> <results> <seed>.
// Every buffer is an allocation of exactly the bytes that the tensor spans. Exit status 3: the runtime refused.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "abi.h"

namespace {
FILE* in;
template <class T>
T take() {
  T value;
  if (std::fread(&value, sizeof value, 1, in) != 1) std::abort();
  return value;
}
}  // namespace

int main(int argc, char** argv) {
  if (argc != 4 || !(in = std::fopen(argv[1], "rb"))) return 2;
  std::string name(take<uint32_t>(), '\0');
  if (std::fread(name.data(), 1, name.size(), in) != name.size()) return 2;
  unsigned grid[3], group[3];
  for (unsigned& d : grid) d = take<uint32_t>();
  for (unsigned& d : group) d = take<uint32_t>();
  std::vector<msl::Arg> args(take<uint32_t>());
  for (msl::Arg& a : args) {
    a.given = msl::Given(take<int32_t>());
    a.item = take<uint64_t>();
    a.bytes = take<uint64_t>();
    a.data = std::malloc(a.bytes);
    if (a.bytes && std::fread(a.data, 1, a.bytes, in) != a.bytes) return 2;
  }
  const char* error = msl_launch(name.c_str(), args.data(), args.size(), grid, group, std::strtoul(argv[3], nullptr, 10));
  if (error) {
    std::fprintf(stderr, "%s\n", error);
    return 3;
  }
  FILE* out = std::fopen(argv[2], "wb");
  if (!out) return 2;
  for (const msl::Arg& a : args) std::fwrite(a.data, 1, a.bytes, out);
  return std::fclose(out) ? 2 : 0;
}
