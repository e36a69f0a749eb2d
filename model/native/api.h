#pragma once

#include <exception>
#include <string>

#define MR_API extern "C" __attribute__((visibility("default")))

namespace mr {

std::string& last_error();  // of the calling thread

// Nothing throws across the C interface: 0, or 1 with the reason kept for mr_error().
template <class F>
int guarded(const F& f) {
    try {
        f();
        return 0;
    } catch (const std::exception& e) {
        last_error() = e.what();
        return 1;
    }
}

}  // namespace mr
