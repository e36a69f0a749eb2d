// Small operations on one row. Sums over a row run in four 16-lane accumulators and end in one fixed tree.
#pragma once

#include <cmath>

#include "math.h"

namespace mr {

MR_INLINE int round16(int n) { return (n + 15) / 16 * 16; }

struct Sum {
    F16 part[4] = {zero16(), zero16(), zero16(), zero16()};
    MR_INLINE F16 whole() const { return mr::add(mr::add(part[0], part[1]), mr::add(part[2], part[3])); }
    MR_INLINE float total() const { return sum16(whole()); }
};

// Calls f(offset, lanes, which) for successive pieces of 16, `which` counting 0..3 round and round; written out, so that
// what is chosen by `which` stays in registers.
template <class F>
MR_INLINE void each16(int n, const F& f) {
    int i = 0;
    for (; i + 64 <= n; i += 64) f(i, 16, 0), f(i + 16, 16, 1), f(i + 32, 16, 2), f(i + 48, 16, 3);
    const int rest = n - i;
    if (rest == 0) return;
    f(i, min_int(rest, 16), 0);
    if (rest > 16) f(i + 16, min_int(rest - 16, 16), 1);
    if (rest > 32) f(i + 32, min_int(rest - 32, 16), 2);
    if (rest > 48) f(i + 48, rest - 48, 3);
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

// x * scale * weight
MR_INLINE void scale_norm(const float* x, const float* weight, int n, float by, float* out) {
    const F16 scale = set16(by);
    each16(n, [&](int i, int lanes, int) {
        store16_n(out + i, mul(mul(load16_n(x + i, lanes), scale), load16_n(weight + i, lanes)), lanes);
    });
}

MR_INLINE void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
    scale_norm(x, weight, n, rms_scale(x, n, eps), out);
}

}  // namespace mr
