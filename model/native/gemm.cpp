#include "gemm.h"

#include "mx.h"

namespace mr {
namespace {

constexpr int kTileRows = 6;

// Panels per kernel call by row count: enough independent chains to cover the latency of a fused multiply-add, as
// few as the register file holds.
constexpr int kWide[kTileRows + 1] = {0, 4, 3, 2, kLanes == 16 ? 2 : 1, kLanes == 16 ? 2 : 1,
                                      kLanes == 16 ? 2 : 1};
// How many bytes ahead of its use a weight is asked for, in each of P streams. Measured: the hardware's own prefetch
// leaves a quarter of the large products' speed and half of a few rows' on the table.
template <int P>
constexpr int kAhead = P == 4 ? 384 : 8192 / P;

template <int R, int P>
struct Acc { V v[R][P * 2]; };

template <int R, int P>
MR_INLINE void clear(Acc<R, P>& acc) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int i = 0; i < P * 2; ++i) acc.v[r][i] = zero();
}

template <int R, int P>
MR_INLINE void step(Acc<R, P>& acc, int p, const float* const* a, int k, V low, V high) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        if constexpr (R * P == 6 && R > 1 && P > 1) {  // fills the register file to the last
            const V x = set1_anew(a[r] + k);
            fma_into(acc.v[r][p * 2], x, low);
            fma_into(acc.v[r][p * 2 + 1], x, high);
        } else {
            const V x = set1(a[r][k]);
            acc.v[r][p * 2] = fma(x, low, acc.v[r][p * 2]);
            acc.v[r][p * 2 + 1] = fma(x, high, acc.v[r][p * 2 + 1]);
        }
    }
}

// `next`, where not zero, is how far from these weights those lie that are wanted after them: into the second-level cache.
template <int R, int P, bool fetches = false>
MR_INLINE void accumulate_bf16(Acc<R, P>& acc, const float* const* a, const uint8_t* w, size_t panel_bytes, int K,
                               ptrdiff_t next = 0) {
#pragma GCC unroll 2
    for (int k = 0; k < K; ++k)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            const uint8_t* at = w + size_t(p) * panel_bytes + size_t(k) * 4 * kLanes;
            __builtin_prefetch(at + kAhead<P>);
            if (fetches) __builtin_prefetch(at + next, 0, 2);
            const I words = load_i(at);
            step(acc, p, a, k, low_bf16(words), high_bf16(words));
        }
}

template <int R, int P>
MR_INLINE void accumulate_f32(Acc<R, P>& acc, const float* const* a, const uint8_t* w, size_t panel_bytes, int K) {
#pragma GCC unroll 2
    for (int k = 0; k < K; ++k)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            const auto* at = reinterpret_cast<const float*>(w + size_t(p) * panel_bytes) + size_t(k) * kPanel;
            __builtin_prefetch(at + kAhead<P> / 4);
            step(acc, p, a, k, load(at), load(at + kLanes));
        }
}

template <int R, int P>
MR_INLINE void accumulate_mx(Acc<R, P>& acc, const float* const* a, const uint8_t* w, size_t panel_bytes, int K) {
    for (int g = 0; g < K / kMxGroup; ++g) {
        V scale[P * 2];
#pragma GCC unroll 4
        for (int i = 0; i < P * 2; ++i)
            scale[i] = mx_scale(w + size_t(i / 2) * panel_bytes + size_t(g) * kMxGroupBytes + (i % 2) * kLanes);
        for (int q = 0; q < kMxQuads; ++q)
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) {
                I words[4];
                mx_quad(w + size_t(p) * panel_bytes + size_t(g) * kMxGroupBytes + kPanel + q * 4 * kLanes, words);
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i)
                    step(acc, p, a, g * kMxGroup + q * 4 + i, mul(low_bf16(words[i]), scale[p * 2]),
                         mul(high_bf16(words[i]), scale[p * 2 + 1]));
            }
    }
}

// The accumulated tile, [rows][panels * kPanel], goes where the job wants it.
void finish(const GemmJob& job, const float* tile, int rows, int panels, int row0, int panel0) {
    const int outputs = job.w->panel_outputs(), first = panel0 * outputs;
    const int count = min_int(panels * outputs, job.w->n - first);
    for (int r = 0; r < rows; ++r, tile += panels * kPanel) {
        float* c = job.c + ptrdiff_t(row0 + r) * job.ldc + first;
        const float* d = job.d ? job.d + ptrdiff_t(row0 + r) * job.ldd + first : nullptr;
        for (int i = 0; i < count; i += kLanes) {
            const int n = min_int(kLanes, count - i);
            V x;
            switch (job.finish) {
                case Finish::kAdd: x = add(n == kLanes ? load(d + i) : load_n(d + i, n), load(tile + i)); break;
                case Finish::kGate:
                    x = mul(load(tile + i), sigmoid(n == kLanes ? load(d + i) : load_n(d + i, n)));
                    break;
                case Finish::kGlu: x = gated(job.act, load(tile + 2 * i), load(tile + 2 * i + kLanes)); break;
                default: x = load(tile + i);
            }
            if (n == kLanes) store(c + i, x);
            else store_n(c + i, x, n);
        }
    }
}

template <Kind kind, int R, int P>
void tile(const GemmJob& job, int row0, int panel0) {
    const float* a[R];
    for (int r = 0; r < R; ++r) a[r] = job.a + ptrdiff_t(job.rows ? job.rows[row0 + r] : row0 + r) * job.lda;
    const Matrix& m = *job.w;
    const uint8_t* w = m.panel(panel0);
    Acc<R, P> acc;
    clear(acc);
    if constexpr (kind == Kind::kBf16) {
        if (R <= 3 && job.next) accumulate_bf16<R, P, true>(acc, a, w, m.panel_bytes, m.k, job.next->data - m.data);
        else accumulate_bf16(acc, a, w, m.panel_bytes, m.k);
    }
    if constexpr (kind == Kind::kF32) accumulate_f32(acc, a, w, m.panel_bytes, m.k);
    if constexpr (kind == Kind::kMx) accumulate_mx(acc, a, w, m.panel_bytes, m.k);
    alignas(64) float out[R * P * kPanel];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int i = 0; i < P * 2; ++i) store(out + (r * P * 2 + i) * kLanes, acc.v[r][i]);
    finish(job, out, R, P, row0, panel0);
}

// Four rows of one panel have too few chains and of two panels too many: three panels are taken one and a half at a
// time. `shared` is the panel between, of which this half takes the low columns (first) or the high ones.
template <bool first>
__attribute__((noinline)) void one_and_a_half(const float* const* a, const uint8_t* whole, const uint8_t* shared, int K,
                                              float* out) {
    constexpr int R = 4;
    V acc[R][3];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = acc[r][2] = zero();
#pragma GCC unroll 2
    for (int k = 0; k < K; ++k) {
        const uint8_t *at = whole + size_t(k) * 4 * kLanes, *half = shared + size_t(k) * 4 * kLanes;
        __builtin_prefetch(at + kAhead<2>);
        if (first) __builtin_prefetch(half + kAhead<2>);
        const I words = load_i(at), more = load_i(half);
        const V w[3] = {low_bf16(words), high_bf16(words), first ? low_bf16(more) : high_bf16(more)};
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const V x = set1_anew(a[r] + k);
#pragma GCC unroll 3
            for (int i = 0; i < 3; ++i) fma_into(acc[r][i], x, w[i]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        float* to = out + r * 3 * kPanel;
        store(to + (first ? 0 : 4) * kLanes, acc[r][0]);
        store(to + (first ? 1 : 5) * kLanes, acc[r][1]);
        store(to + (first ? 2 : 3) * kLanes, acc[r][2]);
    }
}

void three_panels(const GemmJob& job, int row0, int panel0) {
    const float* a[4];
    for (int r = 0; r < 4; ++r) a[r] = job.a + ptrdiff_t(job.rows ? job.rows[row0 + r] : row0 + r) * job.lda;
    const Matrix& m = *job.w;
    alignas(64) float out[4 * 3 * kPanel];
    one_and_a_half<true>(a, m.panel(panel0), m.panel(panel0 + 1), m.k, out);
    one_and_a_half<false>(a, m.panel(panel0 + 2), m.panel(panel0 + 1), m.k, out);
    finish(job, out, 4, 3, row0, panel0);
}

// All panels of [panel0, panel1) for R rows.
template <Kind kind, int R>
void strip(const GemmJob& job, int row0, int panel0, int panel1) {
    constexpr int wide = kind == Kind::kMx ? (R == 1 ? 2 : 1) : kWide[R];
    int p = panel0;
    if constexpr (kind == Kind::kBf16 && R == 4 && wide == 1)
        for (; p + 3 <= panel1; p += 3) three_panels(job, row0, p);
    if constexpr (wide >= 3)  // the last ones so that none is left alone, with too few chains
        for (int left; (left = panel1 - p) > 2;) {
            if (wide == 4 && (left == 4 || left > 6)) tile<kind, R, wide>(job, row0, p), p += wide;
            else if (left == 4) tile<kind, R, 2>(job, row0, p), p += 2;
            else tile<kind, R, 3>(job, row0, p), p += 3;
        }
    if constexpr (wide >= 2)
        for (; p + 2 <= panel1; p += 2) tile<kind, R, 2>(job, row0, p);
    for (; p < panel1; ++p) tile<kind, R, 1>(job, row0, p);
}

template <Kind kind>
void strip(const GemmJob& job, int rows, int row0, int panel0, int panel1) {
    switch (rows) {
        case 1: return strip<kind, 1>(job, row0, panel0, panel1);
        case 2: return strip<kind, 2>(job, row0, panel0, panel1);
        case 3: return strip<kind, 3>(job, row0, panel0, panel1);
        case 4: return strip<kind, 4>(job, row0, panel0, panel1);
        case 5: return strip<kind, 5>(job, row0, panel0, panel1);
        default: return strip<kind, 6>(job, row0, panel0, panel1);
    }
}

// Rows [row0, row1) in tiles of six, the best, and never a last one of one or two rows, the worst.
void strips(const GemmJob& job, int row0, int row1, int panel0, int panel1) {
    for (int r = row0, rows; r < row1; r += rows) {
        const int left = row1 - r;
        rows = left == 7 || left == 8 ? 4 : min_int(left, kTileRows);
        if (job.w->kind == Kind::kBf16) strip<Kind::kBf16>(job, rows, r, panel0, panel1);
        else if (job.w->kind == Kind::kF32) strip<Kind::kF32>(job, rows, r, panel0, panel1);
        else strip<Kind::kMx>(job, rows, r, panel0, panel1);
    }
}

constexpr size_t kNear = size_t(192) << 10;  // bytes of panels that one block of rows after the other finds in a cache

// A block of rows stays in the second-level cache while the panels stream past it.
int block_rows(int k) {
    const int fit = int((size_t(384) << 10) / (size_t(k) * 4)) / kTileRows * kTileRows;
    return fit < 24 ? 24 : fit > 120 ? 120 : fit;
}

}  // namespace

void Gemm::execute(const Task& t, int thread) {
    const GemmJob& job = *t.job;
    if (t.row1 - t.row0 <= kTileRows) return strips(job, t.row0, t.row1, t.panel0, t.panel1);
    const Matrix& m = *job.w;
    if (m.kind != Kind::kMx) {
        const int wide = 6 * m.panel_bytes <= kNear ? 6 : 2;  // six panels are whole tiles of any number of rows
        for (int p = t.panel0; p < t.panel1; p += wide) strips(job, t.row0, t.row1, p, min_int(p + wide, t.panel1));
        return;
    }
    // Widen each panel once and run the bf16 kernel on it: the same weights, so the same bits.
    std::vector<uint8_t>& widened = widened_[size_t(thread)];
    Matrix one = m;
    one.kind = Kind::kBf16;
    one.panel_bytes = size_t(m.k) * kPanel * 2;
    widened.resize(one.panel_bytes);
    GemmJob narrow = job;
    narrow.w = &one;
    for (int p = t.panel0; p < t.panel1; ++p) {
        mx_to_bf16(m.panel(p), m.k, widened.data());
        one.data = widened.data() - ptrdiff_t(one.panel_bytes) * p;
        strips(narrow, t.row0, t.row1, p, p + 1);
    }
}

// Cuts a job into tasks so that successive tasks fill shares of equal cost.
void Gemm::split(const GemmJob& job, double share) {
    const int block = block_rows(job.w->k), blocks = (job.m + block - 1) / block, panels = job.w->panels;
    for (int b = 0; b < blocks; ++b) {
        const int row0 = job.m / blocks * b + min_int(b, job.m % blocks);
        const int row1 = row0 + job.m / blocks + (b < job.m % blocks);
        const double panel_cost = double(row1 - row0) * job.w->k * kPanel;
        const int whole = row1 - row0 == 1 ? 4 : 2;  // panels that a kernel likes to take at once
        for (int p = 0; p < panels;) {
            const int fit = room_ > 0 ? int(room_ / panel_cost / whole + 0.5) * whole : 0, n = min_int(fit, panels - p);
            if (n) tasks_.push_back({&job, p, p + n, row0, row1});
            p += n, room_ -= n * panel_cost;
            if (p == panels) break;
            ends_.push_back(int(tasks_.size()));
            room_ = room_ > -share ? room_ + share : share;
        }
    }
}

// One part a thread, each of them found by whoever runs it: there is no list that has to travel between cores.
void Gemm::in_parts(const GemmJob* jobs, int num_jobs, double total, int parts) {
    pool_->run(parts, [=](int part, int thread) {
        const double begin = total * part / parts, end = total * (part + 1) / parts;
        double before = 0;
        for (int i = 0; i < num_jobs; ++i) {
            const GemmJob& job = jobs[i];
            const int panels = job.w->panels, whole = job.m == 1 ? 4 : 2;
            const double cost = double(job.m) * job.w->k * kPanel;
            const auto cut = [&](double where) {
                const int p = int((where - before) / cost / whole + 0.5) * whole;
                return where <= before ? 0 : where >= total ? panels : min_int(p, panels);
            };
            const Task task{&job, cut(begin), cut(end), 0, job.m};
            if (task.panel1 > task.panel0) execute(task, thread);
            before += cost * panels;
        }
    });
}

void Gemm::run(const GemmJob* jobs, int num_jobs) {
    constexpr double kSmallest = 32768;  // multiply-adds worth handing to another thread
    constexpr double kShare = 200e3;     // and those of a share that is worth its claim: 5 us
    constexpr int kMostShares = 8;       // per thread
    double total = 0;
    for (int i = 0; i < num_jobs; ++i) total += double(jobs[i].m) * jobs[i].w->k * jobs[i].w->panels * kPanel;
    const int threads = pool_ ? pool_->threads() : 1;
    int shares = 1;
    if (threads > 1 && total > 2 * kSmallest && total < kMostShares * kShare * threads)
        return in_parts(jobs, num_jobs, total, threads);
    if (threads > 1 && total > 2 * kSmallest) {
        const int each = int(total / kShare) / threads;
        shares = threads * (each < 1 ? 1 : min_int(each, kMostShares));
    }
    tasks_.clear(), ends_.clear();
    room_ = total / shares;
    for (int i = 0; i < num_jobs; ++i)
        if (jobs[i].m > 0) split(jobs[i], total / shares);
    ends_.push_back(int(tasks_.size()));
    if (shares == 1) {
        for (const Task& t : tasks_) execute(t, 0);
        return;
    }
    pool_->run(int(ends_.size()), [this](int part, int thread) {
        for (int i = part ? ends_[size_t(part) - 1] : 0; i < ends_[size_t(part)]; ++i) execute(tasks_[size_t(i)], thread);
    });
}

}  // namespace mr
