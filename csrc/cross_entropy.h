// Launches csrc/metal/cross_entropy.metal. The caller (riftco/metal/cross_entropy.py) allocates the outputs.
#pragma once
#include "launch.h"

namespace riftco {

struct CrossEntropyParams {  // mirrors csrc/metal/cross_entropy.metal
  Rows logits;
  int64_t stride_v;
  int64_t stride_d_loss;
  int64_t N;
  int64_t V;
  int64_t ignore_index;
  int64_t has_weight;
};

inline void check_cross_entropy(const Tensor& logits, const Tensor& target, const std::optional<Tensor>& row_weight) {
  TORCH_CHECK(logits.dim() >= 1 && target.sizes() == logits.sizes().slice(0, logits.dim() - 1),
              "target must have the shape of logits without its last dimension");
  TORCH_CHECK(target.is_contiguous() && target.numel() > 0 && logits.size(-1) > 0, "contiguous, non-empty inputs");
  TORCH_CHECK(!row_weight || (row_weight->scalar_type() == at::kFloat && row_weight->is_contiguous() &&
                              row_weight->sizes() == target.sizes()),
              "row_weight must be float32, contiguous, of target's shape");
}

inline void cross_entropy_fwd(std::string source, const Tensor& logits, const Tensor& target,
                              const std::optional<Tensor>& row_weight, Tensor loss, Tensor lse, int64_t ignore_index,
                              int64_t inner, int64_t stride_outer, int64_t stride_inner) {
  check_cross_entropy(logits, target, row_weight);
  TORCH_CHECK(lse.is_contiguous() && lse.numel() == 2 * target.numel(), "two numbers a row in lse");
  const CrossEntropyParams params{{inner, stride_outer, stride_inner}, logits.stride(-1), 0, target.numel(),
                                  logits.size(-1), ignore_index, row_weight.has_value()};
  const auto f = kernel(source, "cross_entropy_fwd_" + suffix(logits) + "_" + suffix(target));
  const uint64_t threads = group_threads(*f, params.V);
  f->runCommandBlock([&] {
    f->startEncoding();
    f->setArg(0, logits);
    f->setArg(1, target);
    f->setArg(2, row_weight ? *row_weight : loss);  // a buffer must be bound; it is not read without has_weight
    f->setArg(3, loss);
    f->setArg(4, lse);
    f->setArg(5, params);
    f->dispatch(group_count(params.N) * threads, threads);
  });
}

inline void cross_entropy_bwd(std::string source, const Tensor& d_loss, const Tensor& logits,
                              const Tensor& target, const std::optional<Tensor>& row_weight, const Tensor& lse,
                              Tensor d_logits, int64_t ignore_index, int64_t inner, int64_t stride_outer,
                              int64_t stride_inner, int64_t stride_d_loss) {
  check_cross_entropy(logits, target, row_weight);
  TORCH_CHECK(lse.is_contiguous() && lse.numel() == 2 * target.numel() && d_logits.is_contiguous() &&
                  d_logits.scalar_type() == logits.scalar_type(),
              "contiguous lse of two numbers a row, and d_logits of logits' dtype");
  const CrossEntropyParams params{{inner, stride_outer, stride_inner}, logits.stride(-1), stride_d_loss,
                                  target.numel(), logits.size(-1), ignore_index, row_weight.has_value()};
  const auto f = kernel(source, "cross_entropy_bwd_" + suffix(logits) + "_" + suffix(target));
  const uint64_t threads = group_threads(*f, params.V);
  f->runCommandBlock([&] {
    f->startEncoding();
    f->setArg(0, d_loss);
    f->setArg(1, logits);
    f->setArg(2, target);
    f->setArg(3, row_weight ? *row_weight : lse);  // a buffer must be bound; it is not read without has_weight
    f->setArg(4, lse);
    f->setArg(5, d_logits);
    f->setArg(6, params);
    f->dispatch(group_count(params.N) * threads, threads);
  });
}

}  // namespace riftco
