// What the launch code of every op shares. Plain C++ over PyTorch's own Metal library: the same source is built on
// macOS and, over a stand-in for that library, on Linux.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/native/mps/MetalShaderLibrary.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace riftco {

using at::Tensor;
using KernelFunction = at::native::mps::MetalKernelFunction;

// The kernel `name` of a shader. The text is compiled once a process; PyTorch keeps the pipelines by name.
inline std::shared_ptr<KernelFunction> kernel(const std::string& source, const std::string& name) {
  using Library = at::native::mps::DynamicMetalShaderLibrary;
  static auto& guard = *new std::mutex;  // both outlive every static that may still launch
  static auto& libraries = *new std::unordered_map<std::string, std::unique_ptr<Library>>;
  const std::lock_guard<std::mutex> lock(guard);
  auto& library = libraries[source];
  if (!library) library = std::make_unique<Library>(source);
  return library->getKernelFunction(name);
}

// Threads for `work` items that a threadgroup strides over: whole simdgroups, no more than there is work for.
inline uint64_t group_threads(const KernelFunction& f, int64_t work, uint64_t most = 256) {
  const uint64_t width = f.getThreadExecutionWidth();
  const uint64_t wanted = (std::max<int64_t>(work, 1) + width - 1) / width * width;
  return std::min({wanted, most, f.getMaxThreadsPerThreadgroup() / width * width});
}

// Threadgroups for `rows` rows; a kernel strides over the rows that are left. Enough to fill every Apple GPU, few
// enough that the grid's 32-bit thread count never overflows.
inline uint64_t group_count(int64_t rows) { return std::min<int64_t>(rows, 4096); }

// Launches `name` of a shader whose buffers are the outputs, the inputs and then one struct: 64-bit numbers first, then
// floats. `threads` of a threadgroup: as many as there is work for, or exactly so many where the shader counts on it.
void launch(std::string source, std::string name, const std::vector<Tensor>& outputs,
            const std::vector<Tensor>& inputs, const std::vector<int64_t>& numbers,
            const std::vector<double>& reals, int64_t groups, int64_t threads, bool exact);

}  // namespace riftco
