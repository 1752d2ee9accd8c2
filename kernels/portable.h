/* SPDX-License-Identifier: BSD-3-Clause */
/* portable.h: before every source (-include). Symbols of the system's libraries in the version
 * that torch's libraries ask for: what is built here then runs wherever torch runs, from
 * glibc 2.28 on. Without this the linker takes the newest versions of the build machine. A
 * wheel that asks for more is refused by build_wheel.py; the name that is missing belongs here.
 *
 * Newer pow() differs in errno alone. Nothing is included: sources set feature macros. */
#ifndef OF_PORTABLE_H
#define OF_PORTABLE_H

/* The C library's first version there. */
#if defined(__aarch64__)
#define OF_FIRST GLIBC_2.17
#else
#define OF_FIRST GLIBC_2.2.5
#endif

#define OF_SYMBOL_AT(name, version) __asm__(".symver " #name "," #name "@" #version);
#define OF_SYMBOL(name, version) OF_SYMBOL_AT(name, version)

OF_SYMBOL(pow, OF_FIRST)

/* Symbols of libdl and libpthread, which moved into libc with glibc 2.34. */
OF_SYMBOL(dladdr, OF_FIRST)
OF_SYMBOL(dlerror, OF_FIRST)
OF_SYMBOL(dlopen, OF_FIRST)
OF_SYMBOL(dlsym, OF_FIRST)
OF_SYMBOL(pthread_mutex_trylock, OF_FIRST)
OF_SYMBOL(pthread_once, OF_FIRST)
OF_SYMBOL(pthread_rwlock_destroy, OF_FIRST)
OF_SYMBOL(pthread_rwlock_init, OF_FIRST)
OF_SYMBOL(pthread_rwlock_rdlock, OF_FIRST)
OF_SYMBOL(pthread_rwlock_unlock, OF_FIRST)
OF_SYMBOL(pthread_rwlock_wrlock, OF_FIRST)

/* std::condition_variable::wait(std::unique_lock<std::mutex> &) */
OF_SYMBOL(_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, GLIBCXX_3.4.11)

#undef OF_SYMBOL
#undef OF_SYMBOL_AT
#undef OF_FIRST

#endif
