// SPDX-License-Identifier: BSD-3-Clause
#include "cxx/spelling.h"

#include "base/error.h"
#include "cxx/error.hpp"

namespace optfuse {
namespace {

struct Spelling {
    const char *python, *cxx;
};

// In this order: a phrase comes before its parts. tests/structure looks for phrases that are
// missing here.
const Spelling spellings[] = {
    {"name the model, optfuse.fuse(optimizer, optfuse.Backward(ddp=model)), or use ", "use "},
    {"optfuse.fuse(optimizer, mode=\"forward\")", "optfuse::Mode::forward"},
    {"mode=\"forward\"", "optfuse::Mode::forward"},
    {"inside `with optfuse.accumulate(optimizer):`", "under an optfuse::Accumulate"},
    {"fuse with optfuse.Backward(accumulate=n)", "set optfuse::Options::accumulate"},
    {"backward(create_graph=True)", "backward() with create_graph"},
    {"unfuse the other first", "destroy the optfuse::Fused of the other first"},
    {"unfuse the optimizer", "destroy its optfuse::Fused"},
    {"call optfuse.unfuse() and fuse() again", "destroy its optfuse::Fused and fuse it again"},
    {"optfuse.flush() and torch.cuda.synchronize()",
     "optfuse::flush() and torch::cuda::synchronize()"},
    {"under torch.inference_mode()", "under a c10::InferenceMode"},
    {"assign param.data.resolve_neg() to it", "call param.set_data(param.data().resolve_neg())"},
    {"assign param.data.clone() to it", "call param.set_data(param.data().clone())"},
    {"sparse=False", "sparse(false)"},
    {"build the optimizer with capturable=True", "call step() outside of the capture"},
};

[[maybe_unused]] const bool is_set = [] {
    fail_in_cxx = [](const std::string &text) { throw Error(in_cxx(text)); };
    return true;
}();

} // namespace

std::string in_cxx(std::string text) {
    for (const auto &[python, cxx] : spellings) {
        const std::string phrase = python;
        for (size_t at; (at = text.find(phrase)) != std::string::npos;)
            text.replace(at, phrase.size(), cxx);
    }
    return text;
}

} // namespace optfuse
