// From logits to tokens: the twin in C++ of engine/sampler.py, engine/judge.py and engine/verify.py, which say what
// is computed and why. A draw depends on its own row and request alone, on every machine the same.
#pragma once

#include <cstdint>

namespace mr {

// What to draw for one sequence; mirrored by draw_ffi.py. Rows of logits lie behind each other: one, and one more for
// each drafted token.
struct Wanted {
    const float* logits;   // [num_drafted + 1][vocab]
    const float* laws;     // [num_drafted][vocab], or null: the drafted tokens were certain
    uint64_t seed, position;  // of the first token
    double top_p, temperature;  // 0: greedy
    uint32_t choice;
    int32_t top_k, num_drafted;
};

enum class Rule : int32_t { kStandard, kBlock };

struct Drawn {
    int32_t kept;   // drafted tokens
    int32_t token;  // behind them; kNotFinite: its row has a NaN or an infinity
};
constexpr int32_t kNotFinite = -1;

Drawn draw(const Wanted& wanted, const int32_t* drafted, int vocab, Rule rule);

// The weights of the law that a token is drawn from, [vocab], not normalised; false: the row is not finite.
bool weigh(const Wanted& wanted, int vocab, float* weights);

}  // namespace mr
