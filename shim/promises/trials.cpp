// SPDX-License-Identifier: BSD-3-Clause
// trials.cpp: see trials.h. What is compared are bits, since a sum of zeros may be -0.0, on numbers
// that show the order of a sum, on those that are special, and on the real ones.
#include "promises/trials.h"

#include <ATen/Context.h>
#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/util/TypeCast.h>

#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>

#include "base/clock.h"
#include "base/mkl.h"
#include "base/parallel.h"
#include "base/plain_mode.h"
#include "base/trial_numbers.h"
#include "floating.h"
#include "guard.h"
#include "memory/memory.h"
#include "promises/linear.h"

namespace optfuse {
namespace {

using Key = std::array<int64_t, 20>;
constexpr int kUsesBefore = 2; // a shape that comes so seldom is not worth a trial
constexpr size_t kMostKeys = 1024;
constexpr double kShare = 0.01;      // of the time since the first call
constexpr double kProducts = 12;     // that a trial takes
constexpr int kUsesEnough = 100;     // for a trial at once: it takes 12 % of their time, then less
constexpr uint64_t kTimesAgain = 64; // uses until times are taken once more, then twice as many

struct Entry {
    int uses = 0; // before its trial
    bool is_tried = false, is_equal = false;
    double whole = 0, panels = 0; // least seconds seen; 0: none yet
    uint64_t promised = 0, again = kTimesAgain;
};

struct Trials {
    std::mutex lock;
    std::map<Key, Entry> entries;
    double began = 0, spent = 0; // seconds
};

Trials &trials() {
    static auto *only = new Trials; // leaked: threads may outlive destructors
    return *only;
}

int64_t offset_in_line(const at::Tensor &t) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(data_of(t.unsafeGetTensorImpl())) %
                                OF_CACHE_LINE);
}

// The gradient that a trial is about.
struct Asked {
    const at::Tensor &dy, &x;
    at::ScalarType dtype; // of the parameter's gradient

    at::Tensor whole() const {
        const at::Tensor product = dy.t().mm(x);
        if (dtype == product.scalar_type())
            return product;
        at::Tensor cast = at::empty(product.sizes(), at::TensorOptions(dtype));
        cast_numbers(data_of(product.unsafeGetTensorImpl()), product.scalar_type(),
                     data_of(cast.unsafeGetTensorImpl()), dtype, product.numel());
        return cast;
    }
    SharedProduct by_panels() const {
        SharedProduct found = std::make_shared<const LinearProduct>(dy, x);
        return dtype == x.scalar_type() ? found : cast_product(std::move(found), dtype);
    }
};

// All that may change how PyTorch multiplies.
Key key_of(const Asked &of) {
    const at::Tensor &dy = of.dy, &x = of.x;
    const at::Context &torch = at::globalContext();
    using at::Float32Backend;
    using at::Float32Op;
    const auto precision = [&torch](Float32Backend backend, Float32Op op) {
        return static_cast<int64_t>(torch.float32Precision(backend, op));
    };
    return {dy.size(0),
            dy.size(1),
            x.size(1),
            dy.stride(0),
            dy.stride(1),
            x.stride(0),
            x.stride(1),
            offset_in_line(dy),
            offset_in_line(x),
            static_cast<int64_t>(x.scalar_type()),
            static_cast<int64_t>(of.dtype),
            thread_count(),
            SerialMkl::threads(),
            at::in_parallel_region(),
            of_floating_now(),
            precision(Float32Backend::MKLDNN, Float32Op::MATMUL),
            precision(Float32Backend::GENERIC, Float32Op::ALL),
            torch.userEnabledMkldnn(),
            torch.deterministicAlgorithms(),
            torch.deterministicMkldnn()};
}

template <typename Real> Real special(Draws &draws) {
    using Limits = std::numeric_limits<Real>;
    const Real of[] = {0,
                       Real(-0.0),
                       Limits::denorm_min(),
                       -Limits::min() / 4,
                       Limits::infinity(),
                       -Limits::infinity(),
                       Limits::quiet_NaN(),
                       Limits::max(),
                       1};
    return of[static_cast<size_t>((draws.next() + 1) / 2 * 8.999)];
}

enum class Kind { SPREAD, CANCELLING, TINY, SPECIAL };

template <typename Real> Real rounded(double number) {
    if constexpr (sizeof(Real) == 2)
        return c10::convert<Real>(static_cast<float>(number));
    else
        return static_cast<Real>(number);
}

// Numbers of all magnitudes; row by row such that sums cancel; such that products are around the
// least that is no denormal, which some threads may take for zeros; and with infinities and the
// like.
template <typename Real> Real number(Kind kind, int64_t row, Draws &draws) {
    const double random = draws.next();
    const double most = std::is_same_v<Real, at::Half> ? 8 : 1e3; // products are finite
    switch (kind) {
    case Kind::SPREAD:
        return rounded<Real>(random * random * random * most);
    case Kind::CANCELLING:
        return rounded<Real>((row % 2 == 0 ? 1 : -1) + random * 1e-3);
    case Kind::TINY:
        return rounded<Real>(random * 4 *
                             std::sqrt(static_cast<double>(std::numeric_limits<Real>::min())));
    case Kind::SPECIAL:
        return draws.next() > 0.5 ? special<Real>(draws) : rounded<Real>(random);
    }
    return Real(0);
}

// Zeros, half of them negative, as behind a ReLU: CANCELLING has some in each column.
template <typename Real> void fill_as(at::Tensor &t, Kind kind, Draws &draws) {
    auto *at = static_cast<Real *>(data_of(t.unsafeGetTensorImpl()));
    for (int64_t i = 0; i < t.size(0); i++)
        for (int64_t j = 0; j < t.size(1); j++) {
            const Real value = number<Real>(kind, i, draws);
            const bool is_zero = kind == Kind::CANCELLING && (i * 7 + j) % 5 < 2;
            at[i * t.stride(0) + j * t.stride(1)] = is_zero ? value * Real(0) : value;
        }
}

// A tensor with the sizes, the strides and the offset in a cache line of this one.
at::Tensor like(const at::Tensor &t) {
    const auto offset = offset_in_line(t) / static_cast<int64_t>(t.element_size());
    int64_t extent = 1;
    for (int64_t d = 0; d < t.dim(); d++)
        extent += (t.size(d) - 1) * t.stride(d);
    const at::Tensor flat = at::empty({extent + offset}, t.options());
    return flat.as_strided(t.sizes(), t.strides(), offset);
}

at::Tensor filled(const at::Tensor &t, Kind kind, Draws &draws) {
    at::Tensor made = like(t);
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, t.scalar_type(), "filled",
                                    [&] { fill_as<scalar_t>(made, kind, draws); });
    return made;
}

// Whether each panel, computed as for an update, has the bits of its rows of the whole.
bool are_equal(const Asked &of) {
    const at::Tensor whole = of.whole();
    const SharedProduct product = of.by_panels();
    const auto *at = static_cast<const char *>(data_of(whole.unsafeGetTensorImpl()));
    std::atomic<bool> equal{whole.is_contiguous()};
    product->each_panel([&](int64_t first, int64_t end) {
        const void *panel = equal ? product->panel(first, end) : nullptr;
        const size_t bytes = static_cast<size_t>(end - first) * product->row_bytes();
        const char *rows = at + static_cast<size_t>(first) * product->row_bytes();
        if (panel == nullptr || std::memcmp(panel, rows, bytes) != 0)
            equal = false;
    });
    return equal;
}

bool is_equal_on_all(const Asked &of) {
    Draws draws;
    for (const Kind kind : {Kind::SPREAD, Kind::CANCELLING, Kind::TINY, Kind::SPECIAL})
        if (!are_equal({filled(of.dy, kind, draws), filled(of.x, kind, draws), of.dtype}))
            return false;
    return are_equal(of);
}

void note_least(double *least, double seconds) {
    if (*least == 0 || seconds < *least)
        *least = seconds;
}

// As an update reads a gradient. The sum is of no use but that it can't be left out.
uint64_t read_all(const at::Tensor &whole) {
    const auto *at = static_cast<const uint64_t *>(data_of(whole.unsafeGetTensorImpl()));
    const auto n = static_cast<int64_t>(whole.nbytes() / sizeof *at);
    std::atomic<uint64_t> sum{0};
    in_parallel(n, 1 << 14, [&](int64_t begin, int64_t end) {
        uint64_t part = 0;
        for (int64_t i = begin; i < end; i++)
            part ^= at[i];
        sum ^= part;
    });
    return sum;
}

// The whole goes to memory and comes back; panels stay in the cache.
void time_both(Entry *entry, const Asked &of) {
    const double began = seconds_now();
    const volatile uint64_t read = read_all(of.whole());
    const double between = seconds_now();
    (void)read;
    const SharedProduct product = of.by_panels();
    product->each_panel([&](int64_t first, int64_t end) { product->panel(first, end); });
    note_least(&entry->whole, between - began);
    note_least(&entry->panels, seconds_now() - between);
}

bool has_time(const Trials &all, double seconds) {
    return all.spent + seconds <= kShare * (seconds_now() - all.began);
}

Verdict verdict_of(const Entry &entry, bool forced) {
    if (!entry.is_tried)
        return Verdict::UNTRIED;
    if (!entry.is_equal && OF_GUARD(product_bits))
        return Verdict::DIFFERENT;
    return forced || entry.panels <= entry.whole ? Verdict::EQUAL : Verdict::SLOWER;
}

// How long the whole product takes is noted first, to know what a trial would cost.
void try_now(const Trials &all, Entry *entry, const Asked &of, bool forced) {
    const bool is_worth_it = forced || entry->uses >= kUsesEnough;
    if (is_worth_it || (entry->whole != 0 && has_time(all, kProducts * entry->whole))) {
        entry->is_equal = is_equal_on_all(of);
        entry->is_tried = true;
    }
    if (!forced && (entry->whole == 0 || entry->is_equal))
        time_both(entry, of);
}

} // namespace

Verdict try_panels(const at::Tensor &dy, const at::Tensor &x, at::ScalarType dtype, bool forced) {
    const Asked of{dy, x, dtype};
    Trials &all = trials();
    const std::lock_guard<std::mutex> guard(all.lock);
    if (all.began == 0)
        all.began = seconds_now();
    const Key key = key_of(of);
    const auto found = all.entries.find(key);
    if (found == all.entries.end() && all.entries.size() >= kMostKeys)
        all.entries.clear(); // those that are in use come again
    Entry &entry = found == all.entries.end() ? all.entries[key] : found->second;
    const PlainMode plain;
    const double began = seconds_now();
    if (!entry.is_tried && (++entry.uses > kUsesBefore || forced))
        try_now(all, &entry, of, forced);
    if (entry.is_equal && ++entry.promised >= entry.again && !forced &&
        has_time(all, 2 * entry.whole)) {
        time_both(&entry, of);
        entry.again *= 2;
    }
    all.spent += seconds_now() - began;
    return verdict_of(entry, forced);
}

std::mutex &trials_lock() {
    return trials().lock;
}

} // namespace optfuse
