// The operators that riftco/metal/*.py call. Each takes the shader's text, so that there is one copy of it: the file.
#include <torch/library.h>

#include "launch.h"

#ifndef RIFTCO_TORCH_VERSION  // PyTorch's Metal classes are compiled in: the loader compares this with torch.__version__
#error "build through setup.py, which defines RIFTCO_TORCH_VERSION"
#endif

TORCH_LIBRARY(riftco_mps, m) {
  m.def("built_with() -> str", [] { return std::string(RIFTCO_TORCH_VERSION); });
  m.def(
      "launch(str source, str name, Tensor(a!)[] outputs, Tensor[] inputs, int[] numbers, float[] reals, int groups, "
      "int threads, bool exact) -> ()",
      &riftco::launch);
}
