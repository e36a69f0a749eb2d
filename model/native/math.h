// exp, sigmoid, tanh and softplus to about one unit in the last place, the same operations on every machine.
// Polynomials: Cephes single precision (S. Moshier), on the ranges given there.
#pragma once

#include "f16.h"

namespace mr {

// exp. Below about -86.9 the answer is 0 (never a denormal), above 88.73 infinity; NaN stays NaN because clamping
// keeps the second operand.
MR_INLINE V exp(V x) {
    x = min(set1(89.0f), max(set1(-87.4f), x));
    const V n = round(mul(x, set1(1.44269504088896341f)));
    V r = fnma(n, set1(0.693359375f), x);  // ln 2 in two parts, the first exact in few bits
    r = fnma(n, set1(-2.12194440e-4f), r);
    V p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = add(fma(mul(r, r), p, r), set1(1.0f));
    // 2^n as 2^(n-1) * 2, so that n = 128 stays in range; n = -126 and below becomes 0.
    const V half = as_float(shl<23>(add_i(to_int(n), set1_i(126))));
    return mul(mul(p, half), set1(2.0f));
}

MR_INLINE V sigmoid(V x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }

MR_INLINE V tanh(V x) {
    const V a = abs(x), z = mul(x, x);
    V p = set1(-5.70498872745e-3f);
    p = fma(p, z, set1(2.06390887954e-2f));
    p = fma(p, z, set1(-5.37397155531e-2f));
    p = fma(p, z, set1(1.33314422036e-1f));
    p = fma(p, z, set1(-3.33332819422e-1f));
    const V small = fma(mul(p, z), x, x);
    const V large = sub(set1(1.0f), div(set1(2.0f), add(exp(add(a, a)), set1(1.0f))));
    return less(a, set1(0.625f), small, copysign(large, x));
}

// log(1 + y) for y in [0, 1].
MR_INLINE V log1p_unit(V y) {
    const V u = add(y, set1(1.0f));
    const V lost = div(sub(y, sub(u, set1(1.0f))), u);  // what rounding 1 + y dropped
    const V root2 = set1(1.41421356237309505f);
    const V e = less(root2, u, set1(1.0f), zero());
    const V x = sub(less(root2, u, mul(u, set1(0.5f)), u), set1(1.0f));
    const V z = mul(x, x);
    V p = set1(7.0376836292e-2f);
    p = fma(p, x, set1(-1.1514610310e-1f));
    p = fma(p, x, set1(1.1676998740e-1f));
    p = fma(p, x, set1(-1.2420140846e-1f));
    p = fma(p, x, set1(1.4249322787e-1f));
    p = fma(p, x, set1(-1.6668057665e-1f));
    p = fma(p, x, set1(2.0000714765e-1f));
    p = fma(p, x, set1(-2.4999993993e-1f));
    p = fma(p, x, set1(3.3333331174e-1f));
    V r = mul(mul(p, x), z);
    r = fma(e, set1(-2.12194440e-4f), r);
    r = fma(z, set1(-0.5f), r);
    r = add(r, x);
    return add(fma(e, set1(0.693359375f), r), lost);
}

MR_INLINE V softplus(V x) { return add(max(zero(), x), log1p_unit(exp(sub(zero(), abs(x))))); }

#define MR_EACH(name)                                                \
    MR_INLINE F16 name(F16 a) {                                      \
        for (int i = 0; i < kRegs; ++i) a.r[i] = name(a.r[i]);       \
        return a;                                                    \
    }
MR_EACH(exp)
MR_EACH(sigmoid)
MR_EACH(tanh)
MR_EACH(softplus)
#undef MR_EACH

inline float exp1(float x) { float r; store_n(&r, exp(set1(x)), 1); return r; }
inline float sigmoid1(float x) { float r; store_n(&r, sigmoid(set1(x)), 1); return r; }

// The gated unit of an MLP. SiTU: b1*tanh(g/b1)*sigmoid(g) * b2*tanh(u/b2), without the last part where b2 <= 0;
// SiLU: g*sigmoid(g)*u.
struct Activation {
    bool situ;
    float beta, linear_beta;
};

MR_INLINE V gated(const Activation& act, V g, V u) {
    const V s = sigmoid(g);
    if (!act.situ) return mul(mul(g, s), u);
    const V b = set1(act.beta);
    const V gate = mul(mul(b, tanh(div(g, b))), s);
    if (act.linear_beta <= 0) return mul(gate, u);
    const V b2 = set1(act.linear_beta);
    return mul(gate, mul(b2, tanh(div(u, b2))));
}

}  // namespace mr
