// SPDX-License-Identifier: BSD-3-Clause
// cuda_library.cpp: opens the library of CUDA kernels when the first GPU tensor
// is seen, so that programs without one do not need the library.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>

#include "base/device.h"

namespace optfuse {
namespace {

// Where a C++ program has it: nobody tells.
std::string beside_this_library() {
    const char *named = std::getenv("OPTFUSE_CUDA_LIBRARY");
    if (named != nullptr && *named != '\0')
        return named;
    Dl_info here;
    if (dladdr(reinterpret_cast<void *>(&set_cuda_library), &here) == 0)
        return "";
    std::string path = here.dli_fname;
    path.replace(path.rfind('/') + 1, std::string::npos, "liboptfuse_cuda.so");
    return access(path.c_str(), R_OK) == 0 ? path : "";
}

// leaked: used at exit too
std::optional<std::string> *const told = new std::optional<std::string>;

const std::string &path() {
    if (!*told)
        *told = beside_this_library();
    return **told;
}

template <typename Function> bool find(void *library, const char *name, Function *out) {
    *out = reinterpret_cast<Function>(dlsym(library, name));
    return *out != nullptr;
}

bool find_all(void *library, CudaLibrary *out) {
    return find(library, "of_cuda_abi_version", &out->abi_version) &&
           find(library, "of_cuda_rules", &out->rules) &&
           find(library, "of_cuda_error", &out->error) &&
           find(library, "of_cuda_open", &out->open) &&
           find(library, "of_cuda_prepare", &out->prepare) &&
           find(library, "of_cuda_launch", &out->launch) &&
           find(library, "of_cuda_advance", &out->advance) &&
           find(library, "of_cuda_draw", &out->draw) &&
           find(library, "of_cuda_prepare_packing", &out->prepare_packing) &&
           find(library, "of_cuda_pack", &out->pack) &&
           find(library, "of_cuda_capture", &out->capture) &&
           find(library, "of_cuda_relax", &out->relax);
}

// The first line in which its table of optimizers differs from ours: then options or state
// would be taken for others. "" if there is none.
std::string other_rule(const char *theirs) {
    const char *ours = of_rules_text, *line = theirs;
    for (; *theirs != '\0' && *theirs == *ours; theirs++, ours++)
        if (*theirs == '\n')
            line = theirs + 1;
    return *theirs == *ours ? "" : std::string(line, std::strcspn(line, "\n"));
}

// "" or why the library can't be used.
std::string load(CudaLibrary *out) {
    if (path().empty())
        return "this build of optfuse has no CUDA kernels: rebuild it where nvcc is installed";
    void *library = dlopen(path().c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
        return std::string("the library of CUDA kernels does not load: ") + dlerror();
    if (!find_all(library, out) || out->abi_version() != OF_CUDA_ABI_VERSION)
        return path() + " is of another version of optfuse: rebuild both together";
    const std::string other = other_rule(out->rules());
    if (!other.empty())
        return path() + " has another table of optimizers (\"" + other +
               "\"): rebuild both together";
    if (out->open() != OF_CUDA_OK)
        return out->error();
    return "";
}

} // namespace

// Absolute, since the process may change its directory before the first GPU tensor.
void set_cuda_library(const char *where) {
    char *const absolute = realpath(where, nullptr);
    *told = absolute != nullptr ? absolute : where;
    std::free(absolute);
}

const CudaLibrary *cuda_library() {
    static std::once_flag once;
    static CudaLibrary library;
    static auto *failure = new std::string;
    std::call_once(once, [] { *failure = load(&library); });
    if (failure->empty())
        return &library;
    of_set_error("%s", failure->c_str());
    return nullptr;
}

} // namespace optfuse
