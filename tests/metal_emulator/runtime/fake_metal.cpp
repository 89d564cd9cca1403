// PyTorch's MetalShaderLibrary and MetalKernelFunction over the emulator, so that csrc runs unchanged on Linux. It is
// stricter than Metal: arguments that are missing, superfluous or of another element size are errors.
#include <ATen/core/TensorBase.h>
#include <ATen/native/mps/MetalShaderLibrary.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdio>

#include "abi.h"

namespace {
using Compile = const char* (*)(const char* source);  // a shared library's path, or "!" and what was wrong
Compile compile = nullptr;
std::atomic<unsigned long> seed{0};
std::string record_folder;
std::atomic<int> recorded{0};

struct Library {
  std::string source;
  void* handle;
};
struct Function {
  Library* library;
  std::string name;
};
struct Encoder {
  std::vector<msl::Arg> args;
  std::vector<std::unique_ptr<std::vector<char>>> bytes;
  msl::Arg& at(unsigned index) {
    TORCH_CHECK(index < 31, "Metal has buffers 0 to 30; got ", index);
    if (index >= args.size()) args.resize(index + 1, {msl::Given::nothing, nullptr, 0, 0});
    TORCH_CHECK(args[index].given == msl::Given::nothing, "buffer(", index, ") was set twice");
    return args[index];
  }
};

template <class T>
T symbol(void* handle, const char* name) {
  T found = reinterpret_cast<T>(dlsym(handle, name));
  TORCH_CHECK(found, dlerror());
  return found;
}

void put(FILE* file, const void* data, size_t bytes) { std::fwrite(data, 1, bytes, file); }
template <class T>
void put(FILE* file, T value) {
  put(file, &value, sizeof value);
}

// metal_emulator/jobs.py reads this back.
void record(const Function& f, const Encoder& e, const unsigned* grid, const unsigned* group) {
  const std::string path = record_folder + "/" + std::to_string(recorded++);
  FILE* file = std::fopen(path.c_str(), "wb");
  TORCH_CHECK(file, "cannot write ", path);
  put(file, uint32_t(f.library->source.size()));
  put(file, f.library->source.data(), f.library->source.size());
  put(file, uint32_t(f.name.size()));
  put(file, f.name.data(), f.name.size());
  put(file, grid, 12);
  put(file, group, 12);
  put(file, uint32_t(e.args.size()));
  for (const msl::Arg& a : e.args) {
    put(file, int32_t(a.given));
    put(file, uint64_t(a.item));
    put(file, uint64_t(a.bytes));
    put(file, a.data, a.bytes);
  }
  std::fclose(file);
}
}  // namespace

extern "C" {
void riftco_fake_compiler(Compile f) { compile = f; }
void riftco_fake_seed(unsigned long value) { seed = value; }
void riftco_fake_record(const char* folder) {
  record_folder = folder;
  recorded = 0;
}
}

namespace at::native::mps {
MetalShaderLibrary::~MetalShaderLibrary() { delete static_cast<Library*>(library); }  // the code stays loaded
DynamicMetalShaderLibrary::~DynamicMetalShaderLibrary() = default;

MTLLibrary_t MetalShaderLibrary::getLibrary() {
  if (library) return library;
  TORCH_CHECK(compile, "the emulator's compiler is not set");
  TORCH_CHECK(std::all_of(shaderSource.begin(), shaderSource.end(), [](char c) { return c >= 0; }),
              "PyTorch hands shaders to Metal as ASCII; this text is not");
  const std::string path = compile(shaderSource.c_str());
  TORCH_CHECK(path.empty() || path[0] != '!', "Failed to create metal library, error: ", path.substr(1));
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(handle, dlerror());
  return library = new Library{shaderSource, handle};
}
MTLLibrary_t MetalShaderLibrary::getLibrary(const std::initializer_list<std::string>&) {
  TORCH_CHECK(false, "shader text with parameters is not emulated");
}
std::shared_ptr<MetalKernelFunction> MetalShaderLibrary::getKernelFunction(const std::string& name) {
  Library* lib = static_cast<Library*>(getLibrary());
  TORCH_CHECK(symbol<int (*)(const char*)>(lib->handle, "msl_has")(name.c_str()),
              "Failed to create function state object for: ", name);
  return std::make_shared<MetalKernelFunction>(lib, new Function{lib, name});
}

MetalKernelFunction::MetalKernelFunction(MTLComputePipelineState_t cps_, MTLFunction_t f_) : cps(cps_), func(f_) {}
MetalKernelFunction::~MetalKernelFunction() {
  delete static_cast<Function*>(func);
  delete static_cast<Encoder*>(encoder);
}
uint64_t MetalKernelFunction::getMaxThreadsPerThreadgroup() const { return 1024; }
uint64_t MetalKernelFunction::getThreadExecutionWidth() const { return 32; }

void MetalKernelFunction::runCommandBlock(std::function<void(void)> f) { f(); }
void MetalKernelFunction::startEncoding() {
  delete static_cast<Encoder*>(encoder);
  encoder = new Encoder;
}
void MetalKernelFunction::setArg(unsigned index, const at::TensorBase& t) {
  TORCH_CHECK(encoder, "setArg before startEncoding");
  uint64_t span = t.numel() ? 1 : 0;  // elements from the first to the last that the tensor can name
  for (int64_t d = 0; span && d < t.dim(); d++) span += (t.size(d) - 1) * t.stride(d);
  const uint64_t item = t.element_size();
  static_cast<Encoder*>(encoder)->at(index) = {msl::Given::tensor, const_cast<void*>(t.const_data_ptr()),
                                               span * item, item};
}
void MetalKernelFunction::setArg(unsigned index, const void* data, uint64_t size) {
  TORCH_CHECK(encoder, "setArg before startEncoding");
  TORCH_CHECK(size <= 4096, "setBytes takes at most 4 KiB");
  auto* e = static_cast<Encoder*>(encoder);
  e->bytes.push_back(std::make_unique<std::vector<char>>((const char*)data, (const char*)data + size));
  e->at(index) = {msl::Given::bytes, e->bytes.back()->data(), size, 0};
}
void MetalKernelFunction::dispatch(uint64_t length, std::optional<uint64_t> group) {
  const uint64_t threads = group.value_or(std::min<uint64_t>(length, getMaxThreadsPerThreadgroup()));
  dispatch(c10::ArrayRef<uint64_t>(length), c10::OptionalArrayRef<uint64_t>(c10::ArrayRef<uint64_t>(threads)));
}
void MetalKernelFunction::dispatch(c10::ArrayRef<uint64_t> length, c10::OptionalArrayRef<uint64_t> group) {
  TORCH_CHECK(encoder, "dispatch before startEncoding");
  TORCH_CHECK(group.has_value() && group->size() == length.size() && length.size() <= 3,
              "grid and threadgroup must have the same number of dimensions, at most 3");
  unsigned grid[3] = {1, 1, 1}, size[3] = {1, 1, 1};
  for (size_t d = 0; d < length.size(); d++) {
    TORCH_CHECK(length[d] <= UINT32_MAX, "a grid of ", length[d], " threads: thread positions are 32-bit");
    grid[d] = length[d];
  }
  for (size_t d = 0; d < group->size(); d++) size[d] = (*group)[d];
  const auto& f = *static_cast<Function*>(func);
  const auto& e = *static_cast<Encoder*>(encoder);
  if (!record_folder.empty()) record(f, e, grid, size);
  auto launch = symbol<decltype(&msl_launch)>(f.library->handle, "msl_launch");
  const char* error = launch(f.name.c_str(), e.args.data(), e.args.size(), grid, size, seed);
  TORCH_CHECK(!error, error);
}
}  // namespace at::native::mps
