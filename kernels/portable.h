/* SPDX-License-Identifier: BSD-3-Clause */
/* portable.h: before every source (-include). Symbols of the system's libraries in the version
 * that torch's libraries ask for: what is built here then runs wherever torch runs, from
 * glibc 2.28 on. Without this the linker takes the newest versions of the build machine. A
 * wheel that asks for more is refused by build_wheel.py; the name that is missing belongs here.
 *
 * Newer pow() differs in errno alone. Nothing is included: sources set feature macros. */
#ifndef OF_PORTABLE_H
#define OF_PORTABLE_H

#define OF_SYMBOL(name, version) __asm__(".symver " #name "," #name "@" #version);

OF_SYMBOL(pow, GLIBC_2.2.5)

/* Symbols of libdl and libpthread, which moved into libc with glibc 2.34. */
OF_SYMBOL(dladdr, GLIBC_2.2.5)
OF_SYMBOL(dlerror, GLIBC_2.2.5)
OF_SYMBOL(dlopen, GLIBC_2.2.5)
OF_SYMBOL(dlsym, GLIBC_2.2.5)
OF_SYMBOL(pthread_mutex_trylock, GLIBC_2.2.5)
OF_SYMBOL(pthread_once, GLIBC_2.2.5)
OF_SYMBOL(pthread_rwlock_destroy, GLIBC_2.2.5)
OF_SYMBOL(pthread_rwlock_init, GLIBC_2.2.5)
OF_SYMBOL(pthread_rwlock_rdlock, GLIBC_2.2.5)
OF_SYMBOL(pthread_rwlock_unlock, GLIBC_2.2.5)
OF_SYMBOL(pthread_rwlock_wrlock, GLIBC_2.2.5)

/* std::condition_variable::wait(std::unique_lock<std::mutex> &) */
OF_SYMBOL(_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, GLIBCXX_3.4.11)

#undef OF_SYMBOL

#endif
