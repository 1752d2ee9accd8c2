// SPDX-License-Identifier: BSD-3-Clause
// factored.cpp: an update of one parameter by optfuse.optim's Adafactor or CAME as one operator, which
// their step() calls: the passes of kernels/factored.h, and PyTorch's operators over rows and columns.
// It has the bits of the operators that step() calls elsewhere (_rounding/factored.py).
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "base/plain_mode.h"
#include "base/threads.h"
#include "factored.h"
#include "plan/refuse.h"

namespace optfuse {
namespace {

// The operator's numbers, in the order of _rounding/factored.py. beta1: NaN without an average of updates.
enum {
    n_stochastic, n_seed, n_step, n_parameter, n_eps1, n_eps2, n_clip, n_is_came, n_beta1, n_beta2,
    n_beta3, n_rate, n_scales, n_decay
};

// The best, or what the environment says.
of_isa isa_here() {
    static const of_isa best = of_isa_detect();
    const char *const name = std::getenv("OPTFUSE_ISA");
    of_isa isa = best;
    if (name != nullptr && of_isa_parse(name, &isa))
        isa = std::min(isa, best);
    return isa;
}

class Update {
  public:
    Update(const at::Tensor &param, const at::Tensor &grad, const std::vector<at::Tensor> &its,
           const std::vector<double> &numbers)
        : state(its), n(numbers.data()), numel(param.numel()), is_factored(param.dim() > 1) {
        of_dtype dtype = OF_FLOAT32;
        dtype_of(param.unsafeGetTensorImpl(), &dtype);
        pass = of_factored_find(dtype, isa_here());
        f.param = param.mutable_data_ptr();
        f.grad = grad.const_data_ptr();
        f.is_came = n[n_is_came] != 0;
        f.stochastic = n[n_stochastic] != 0;
        f.seed = static_cast<uint64_t>(n[n_seed]);
        f.step = static_cast<uint32_t>(n[n_step]);
        f.parameter = static_cast<uint32_t>(n[n_parameter]);
        f.columns = static_cast<size_t>(is_factored ? param.size(-1) : numel);
        f.rows = static_cast<size_t>(is_factored ? param.size(-2) : 1);
        f.matrices = static_cast<size_t>(numel) / (f.rows * f.columns);
        f.beta1 = static_cast<float>(n[n_beta1]);
        f.weight1 = static_cast<float>(1 - n[n_beta1]);
        if (!std::isnan(n[n_beta1]))
            f.momentum = (next++)->mutable_data_ptr<float>();
    }

    void run() {
        float size = 0; // of the parameter
        if (!f.is_came)
            *state.back().mutable_data_ptr<float>() = size = rms(OF_PARAM_NORM);
        average(OF_SQUARES, n_eps1, n_beta2);
        f.divisor = std::max(rms(OF_UPDATE_NORM) / static_cast<float>(n[n_clip]), 1.0f); // or NaN
        if (f.is_came)
            average(OF_RESIDUALS, n_eps2, n_beta3);
        f.rate = scaled(size, 1);
        f.decay = scaled(size, -n[n_decay]);
        f.decays = n[n_decay] != 0;
        const int64_t block = OF_FACTORED_BLOCK;
        in_parallel((numel + block - 1) / block, kElements / block, [&](int64_t begin, int64_t end) {
            of_factored part = f;
            pass(&part, OF_WRITE, static_cast<size_t>(begin * block),
                 static_cast<size_t>(std::min(end * block, numel)));
        });
        for (const at::Tensor &tensor : state)
            tensor.unsafeGetTensorImpl()->bump_version();
    }

  private:
    static constexpr int64_t kElements = 1 << 15; // are worth a thread

    float rms(of_factored_pass which) {
        pass(&f, which, 0, 0);
        return f.norm / static_cast<float>(std::pow(static_cast<double>(numel), 0.5));
    }

    // The learning rate times a factor; a number is combined in double, a tensor in float, as step() does.
    float scaled(float size, double factor) const {
        if (n[n_scales] == 0)
            return static_cast<float>(factor * n[n_rate]);
        if (size > static_cast<float>(n[n_eps2]))
            return size * static_cast<float>(n[n_rate]) * static_cast<float>(factor);
        return static_cast<float>(n[n_eps2] * n[n_rate] * factor);
    }

    // Averages of squares, and what they multiply by.
    void average(of_factored_pass which, int eps, int beta) {
        f.eps = static_cast<float>(n[eps]);
        f.beta = static_cast<float>(n[beta]);
        f.weight = static_cast<float>(1.0 - n[beta]);
        if (!is_factored) {
            if (which == OF_SQUARES)
                f.whole = (next++)->mutable_data_ptr<float>();
            pass(&f, which, 0, 1);
            return;
        }
        const at::Tensor &row = *next++, &col = *next++;
        const at::Tensor rows = at::empty_like(row), columns = at::empty_like(col);
        f.row_sums = rows.mutable_data_ptr<float>();
        f.column_sums = columns.mutable_data_ptr<float>();
        sum(which);
        row.mul_(n[beta]).add_(rows.div_(static_cast<int64_t>(f.columns)), 1.0 - n[beta]);
        col.mul_(n[beta]).add_(columns.div_(static_cast<int64_t>(f.rows)), 1.0 - n[beta]);
        by_row = row.div(row.mean(at::IntArrayRef{-1}, true)).rsqrt_();
        by_column = col.rsqrt();
        f.by_row = by_row.const_data_ptr<float>();
        f.by_column = by_column.const_data_ptr<float>();
    }

    void sum(of_factored_pass which) {
        const auto matrices = static_cast<int64_t>(f.matrices);
        const int64_t least = std::max<int64_t>(kElements * matrices / numel, 1);
        const int64_t threads = std::min<int64_t>(thread_count(), matrices);
        const auto size = static_cast<int64_t>(of_factored_room(f.rows, f.columns));
        const at::Tensor rooms = at::empty({threads, size}, at::kFloat);
        float *const room = rooms.mutable_data_ptr<float>();
        in_parallel(matrices, least, [&](int64_t begin, int64_t end) {
            of_factored part = f;
            part.room = room + omp_get_thread_num() % threads * size;
            pass(&part, which, static_cast<size_t>(begin), static_cast<size_t>(end));
        });
    }

    const std::vector<at::Tensor> &state;
    std::vector<at::Tensor>::const_iterator next = state.begin();
    const double *const n;
    const int64_t numel;
    const bool is_factored;
    of_factored f = {};
    of_factored_fn *pass;
    at::Tensor by_row, by_column;
};

void factored(const at::Tensor &param, const at::Tensor &grad, std::vector<at::Tensor> state,
              std::vector<double> numbers) {
    const bool is_came = numbers.size() > n_is_came && numbers[n_is_came] != 0;
    const bool has_momentum = numbers.size() > n_beta1 && !std::isnan(numbers[n_beta1]);
    const size_t averages = param.dim() > 1 ? (is_came ? 4 : 2) : 1;
    if (numbers.size() != n_decay + 1 || grad.sizes() != param.sizes() ||
        grad.dtype() != param.dtype() || state.size() != has_momentum + averages + !is_came)
        fail("optfuse: factored() got a gradient or a state that is not of its parameter's form");
    set_threads_as_operators(param.numel());
    const PlainMode plain;
    Update(param, grad, state, numbers).run();
    param.unsafeGetTensorImpl()->bump_version();
}

} // namespace
} // namespace optfuse

// state: in the order of _rounding/factored.py. All are contiguous, and who calls it has looked at that.
TORCH_LIBRARY_FRAGMENT(optfuse, m) {
    m.def("factored(Tensor(a!) param, Tensor grad, Tensor(b!)[] state, float[] numbers) -> ()",
          torch::dispatch(c10::kCPU, TORCH_FN(optfuse::factored)));
}
