// SPDX-License-Identifier: BSD-3-Clause
// numbered.h: the tensors of a tape by numbers, in the order in which lines have them. Two tensors
// over the same elements have one number, such as p and p.data.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <vector>

#include "recorded/tape.h"

namespace optfuse::recorded {

struct Entry {
    c10::TensorImpl *impl; // the first that has the number
    c10::StorageImpl *storage;
    int64_t offset, numel;
    at::ScalarType dtype;
    uint32_t storage_number;
    uint32_t next = UINT32_MAX; // on the same storage
    uint32_t seen = 0;          // how many values of the tape refer to impl
    bool is_alone = true;       // on its storage
    bool is_absent;
    bool is_needed = true; // somebody has it, or will, once the lines have run

    void *memory() const {
        return static_cast<char *>(address(storage)) +
               c10::elementSize(dtype) * static_cast<size_t>(offset);
    }
};

// The tensors that a schedule needs, and the words that it depends on.
class Numbered {
  public:
    void read(const std::vector<Line> &lines, const std::vector<c10::IValue> &values);
    // The number of a tensor that is on the tape.
    uint32_t of(const at::Tensor &tensor) const;

    std::vector<Entry> entries;
    std::vector<uint64_t> words; // equal: the same schedule
    uint32_t n_storages = 0;

  private:
    uint32_t find(const c10::TensorImpl *impl, uint32_t first) const;
    void put(const at::Tensor &tensor);
    void put(const c10::IValue &value, bool by_class);
    void put_new(c10::TensorImpl *impl, uint32_t head);

    ska::flat_hash_map<const c10::StorageImpl *, uint32_t> heads;
};

} // namespace optfuse::recorded
