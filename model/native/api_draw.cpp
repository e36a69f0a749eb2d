// Drawing tokens behind the C interface: every drafted id is checked before a law is read at it.
#include <stdexcept>
#include <string>

#include "api.h"
#include "draw.h"
#include "random.h"

using namespace mr;

namespace {

std::string fault(const Wanted* wanted, int32_t count, int32_t vocab, const int32_t* drafted) {
    if (vocab < 1) return "an empty vocabulary";
    for (int s = 0; s < count; drafted += wanted[s].num_drafted, ++s)
        for (int i = 0; i < wanted[s].num_drafted; ++i)
            if (drafted[i] < 0 || drafted[i] >= vocab)
                return "draw " + std::to_string(s) + ": drafted id " + std::to_string(drafted[i]) +
                       " is outside the vocabulary of " + std::to_string(vocab);
    return "";
}

}  // namespace

// `drafted`: all draws' tokens behind each other. 0: done; 1: no memory; 2: refused, nothing was read.
MR_API int mr_draw(const Wanted* wanted, int32_t count, int32_t vocab, const int32_t* drafted, int32_t rule, Drawn* out) {
    std::string wrong;
    if (guarded([&] { wrong = fault(wanted, count, vocab, drafted); })) return 1;
    if (!wrong.empty()) return last_error() = wrong, 2;
    return guarded([&] {
        for (int s = 0; s < count; drafted += wanted[s].num_drafted, ++s) out[s] = draw(wanted[s], drafted, vocab, Rule(rule));
    });
}

// Single parts, for tests.
MR_API int mr_op_weigh(const Wanted* wanted, int32_t vocab, float* weights) {
    return guarded([&] {
        if (!weigh(*wanted, vocab, weights)) throw std::runtime_error("not finite");
    });
}

MR_API double mr_op_uniform(uint64_t seed, uint32_t choice, uint64_t position, uint32_t purpose, uint32_t slot) {
    return uniform(seed, choice, position, Purpose(purpose), slot);
}
