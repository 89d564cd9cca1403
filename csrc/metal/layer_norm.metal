// Layer normalisation: riftco/kernels/layer_norm/spec.py says what it means.
#include <metal_stdlib>
using namespace metal;
#include "norm.h"

INSTANTIATE_ROWS("layer_norm", "f32_f32", float, float, true)
INSTANTIATE_ROWS("layer_norm", "f16_f16", half, half, true)
INSTANTIATE_ROWS("layer_norm", "f16_f32", half, float, true)
INSTANTIATE_ROWS("layer_norm", "bf16_bf16", bfloat, bfloat, true)
INSTANTIATE_ROWS("layer_norm", "bf16_f32", bfloat, float, true)
INSTANTIATE_COLUMNS("layer_norm", "f32", float, true)
INSTANTIATE_COLUMNS("layer_norm", "f16", half, true)
INSTANTIATE_COLUMNS("layer_norm", "bf16", bfloat, true)
