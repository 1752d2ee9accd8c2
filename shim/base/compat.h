// SPDX-License-Identifier: BSD-3-Clause
// compat.h: what differs between the supported releases of PyTorch.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <torch/version.h>

#include <memory>

#define OF_TORCH_AT_LEAST(minor)                                                                  \
    (TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= (minor)))

#if !OF_TORCH_AT_LEAST(11) // TESTED of _library/releases.py; a later release may do
#error "optfuse needs torch 2.11 or newer"
#endif

namespace optfuse {

// Whether Muon divides a bfloat16 update in place before it orthogonalizes it. Later
// releases divide a copy.
constexpr bool kMuonDividesInput = !OF_TORCH_AT_LEAST(15);

// Every supported release has this key. It comes before autograd and autocast, and is
// meant for libraries that want a key of their own.
constexpr c10::DispatchKey kPendingKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// key_set_ is a protected member; a derived class may form a pointer to it.
struct KeySet : c10::TensorImpl {
    static c10::DispatchKeySet &of(c10::TensorImpl *impl) { return impl->*(&KeySet::key_set_); }
};

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
inline WeakStorage weak(c10::StorageImpl *storage) {
    return WeakStorage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
}

inline bool has_mark(const c10::TensorImpl *impl) { return impl->key_set().has(kPendingKey); }

inline void mark(c10::TensorImpl *impl) {
    auto &keys = KeySet::of(impl);
    keys = keys.add(kPendingKey);
}

inline void unmark(c10::TensorImpl *impl) {
    auto &keys = KeySet::of(impl);
    keys = keys.remove(kPendingKey);
}

// A sealed storage raises when C++ asks for its address. PyTorch's own function for that
// allocates, and 2.11 has none for the way back. An explicit instantiation may name private
// members.
template <bool c10::StorageImpl::*Flag> struct SealFlag {
    friend bool &seal_flag(c10::StorageImpl *storage) { return storage->*Flag; }
};
bool &seal_flag(c10::StorageImpl *storage);
template struct SealFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

template <void (c10::StorageImpl::*Refresh)()> struct SealCheck {
    friend void refresh_seal_check(c10::StorageImpl *storage) { (storage->*Refresh)(); }
};
void refresh_seal_check(c10::StorageImpl *storage);
template struct SealCheck<&c10::StorageImpl::refresh_has_data_ptr_check>;

// Autograd's record of a tensor, or null. PyTorch's own function is a call.
template <std::unique_ptr<c10::AutogradMetaInterface> c10::TensorImpl::*Record>
struct AutogradRecord {
    friend c10::AutogradMetaInterface *autograd_record(const c10::TensorImpl *impl) {
        return (impl->*Record).get();
    }
};
c10::AutogradMetaInterface *autograd_record(const c10::TensorImpl *impl);
template struct AutogradRecord<&c10::TensorImpl::autograd_meta_>;

inline void set_seal(c10::StorageImpl *storage, bool sealed) {
    seal_flag(storage) = sealed;
    refresh_seal_check(storage);
}

// This seal raises only where C++ asks for an address to write to.
template <bool c10::StorageImpl::*Flag> struct WriteSealFlag {
    friend bool &write_seal_flag(c10::StorageImpl *storage) { return storage->*Flag; }
};
bool &write_seal_flag(c10::StorageImpl *storage);
template struct WriteSealFlag<&c10::StorageImpl::throw_on_mutable_data_ptr_>;

inline void set_write_seal(c10::StorageImpl *storage, bool sealed) {
    write_seal_flag(storage) = sealed;
    refresh_seal_check(storage);
}

inline bool is_sealed(c10::StorageImpl *storage) { return seal_flag(storage); }

inline void seal(c10::StorageImpl *storage) { set_seal(storage, true); }

inline void unseal(c10::StorageImpl *storage) { set_seal(storage, false); }

// Its memory without the seal's check. There is no such function of a const one.
inline c10::DataPtr &data_ptr_of(const c10::StorageImpl *storage) {
    return const_cast<c10::StorageImpl *>(storage)->_mutable_data_ptr_no_checks();
}

// The address without the seal's check.
inline void *address(c10::StorageImpl *storage) {
    return storage->_mutable_data_ptr_no_checks().mutable_get();
}

// References to a storage or a tensor that stand for no second owner: PyTorch keeps a
// Python wrapper that nobody in Python holds any more for re-use.
template <class Impl> size_t idle_references(const Impl &impl) {
    return impl.pyobj_slot()->has_unique_reference() ? 1 : 0;
}

// Those of Python, idle or not.
template <class Impl> size_t python_references(const Impl &impl) {
    return impl.pyobj_slot()->load_pyobj() != nullptr ? 1 : 0;
}

// Its object of Python; or null.
inline void *python_object(const c10::TensorImpl &impl) { return impl.pyobj_slot()->load_pyobj(); }

} // namespace optfuse
