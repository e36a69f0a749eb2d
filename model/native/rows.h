// Small operations on one row. Sums over a row run in four 16-lane accumulators and end in one fixed tree.
#pragma once

#include <cmath>

#include "math.h"

namespace mr {

MR_INLINE int round16(int n) { return (n + 15) / 16 * 16; }

struct Sum {
    F16 part[4] = {zero16(), zero16(), zero16(), zero16()};
    MR_INLINE float total() const { return sum16(mr::add(mr::add(part[0], part[1]), mr::add(part[2], part[3]))); }
};

// Calls f(offset, lanes, which) for successive pieces of 16, `which` counting 0..3 round and round.
template <class F>
MR_INLINE void each16(int n, const F& f) {
    int i = 0, which = 0;
    for (; i + 16 <= n; i += 16, which = (which + 1) & 3) f(i, 16, which);
    if (i < n) f(i, n - i, which);
}

MR_INLINE float sum_squares(const float* x, int n) {
    Sum s;
    each16(n, [&](int i, int lanes, int j) {
        const F16 a = load16_n(x + i, lanes);
        s.part[j] = fma(a, a, s.part[j]);
    });
    return s.total();
}

// 1 / sqrt(mean of squares + eps)
MR_INLINE float rms_scale(const float* x, int n, float eps) {
    return 1.0f / std::sqrt(sum_squares(x, n) / float(n) + eps);
}

MR_INLINE void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
    const F16 scale = set16(rms_scale(x, n, eps));
    each16(n, [&](int i, int lanes, int) {
        store16_n(out + i, mul(mul(load16_n(x + i, lanes), scale), load16_n(weight + i, lanes)), lanes);
    });
}

}  // namespace mr
