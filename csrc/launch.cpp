#include "launch.h"

#include <cstring>

namespace riftco {

void launch(std::string source, std::string name, const std::vector<Tensor>& outputs,
                   const std::vector<Tensor>& inputs, const std::vector<int64_t>& numbers,
                   const std::vector<double>& reals, int64_t groups, int64_t threads, bool exact) {
  TORCH_CHECK(groups > 0 && threads > 0, name, ": an empty grid");
  const auto f = kernel(source, name);
  const uint64_t group = exact ? threads : group_threads(*f, threads);
  TORCH_CHECK(group <= f->getMaxThreadsPerThreadgroup(), name, " needs ", group,
              " threads a threadgroup; this GPU runs it with at most ", f->getMaxThreadsPerThreadgroup());
  std::vector<char> params(8 * (numbers.size() + (reals.size() + 1) / 2));  // as long as the struct's alignment asks
  std::memcpy(params.data(), numbers.data(), 8 * numbers.size());
  for (size_t i = 0; i < reals.size(); i++) {
    const float value = reals[i];
    std::memcpy(params.data() + 8 * numbers.size() + 4 * i, &value, 4);
  }
  f->runCommandBlock([&] {
    f->startEncoding();
    unsigned index = 0;
    for (const Tensor& t : outputs) f->setArg(index++, t);
    for (const Tensor& t : inputs) f->setArg(index++, t);
    f->setArg(index, params.data(), params.size());
    f->dispatch(group_count(groups) * group, group);
  });
}

}  // namespace riftco
