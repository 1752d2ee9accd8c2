/* SPDX-License-Identifier: BSD-3-Clause */
/* old_runtime.c: what C++'s headers call that torch's libraries don't ask for, because only
 * newer systems have it. The library answers by itself, with what older systems have; as
 * kernels/portable.h, where an older version of the same name will do. */
#include <stddef.h>

#define HIDDEN __attribute__((visibility("hidden")))

/* From glibc 2.32 on libc says whether this process has one thread. Then references need not be
 * counted with atomic instructions. torch has threads. */
extern char __libc_single_threaded;
HIDDEN char __libc_single_threaded = 0;

/* std::exception_ptr counts references. Older headers call the constructor and the destructor:
 * one copy that is never destroyed, and one destruction. Without optimization the library has
 * these two itself, by the newer headers, which would call each other for ever. */
#ifdef __OPTIMIZE__
void _ZNSt15__exception_ptr13exception_ptrC1ERKS0_(void *self, const void *other);
void _ZNSt15__exception_ptr13exception_ptrD1Ev(void *self);
HIDDEN void _ZNSt15__exception_ptr13exception_ptr9_M_addrefEv(void *self);
HIDDEN void _ZNSt15__exception_ptr13exception_ptr10_M_releaseEv(void *self);

void _ZNSt15__exception_ptr13exception_ptr9_M_addrefEv(void *self) {
    void *copy = NULL;
    _ZNSt15__exception_ptr13exception_ptrC1ERKS0_(&copy, self);
}

void _ZNSt15__exception_ptr13exception_ptr10_M_releaseEv(void *self) {
    _ZNSt15__exception_ptr13exception_ptrD1Ev(self);
}
#endif

/* std::ostringstream(), of which older headers make ostringstream(std::ios_base::out). */
void _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1ESt13_Ios_Openmode(void *self,
                                                                                      int mode);
HIDDEN void _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev(void *self);

void _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev(void *self) {
    const int out = 1 << 4;
    _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1ESt13_Ios_Openmode(self, out);
}

/* std::__throw_bad_array_new_length() */
__attribute__((noreturn)) void __cxa_throw_bad_array_new_length(void);
HIDDEN __attribute__((noreturn)) void _ZSt28__throw_bad_array_new_lengthv(void);

void _ZSt28__throw_bad_array_new_lengthv(void) {
    __cxa_throw_bad_array_new_length();
}

/* std::stringbuf::str() && of C++20 moves the text out. Older headers copy it, and str("") then
 * leaves the same empty buffer. A short std::string has its text within itself. */
typedef struct {
    const char *text;
    size_t size;
    char within[16];
} short_string;
__attribute__((used)) static const short_string empty_string = {empty_string.within, 0, ""};

#ifdef __aarch64__

/* The address for a result comes in x8, where C has no name for it, and is handed on. The second
 * is str() const & of C++20, which is what str() const was. */
__asm__(".text\n"
        ".globl _ZNOSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv\n"
        ".hidden _ZNOSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv\n"
        ".type _ZNOSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv, %function\n"
        "_ZNOSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv:\n"
        "    .cfi_startproc\n"
        "    stp x29, x30, [sp, #-32]!\n"
        "    .cfi_def_cfa_offset 32\n"
        "    .cfi_offset 29, -32\n"
        "    .cfi_offset 30, -24\n"
        "    str x0, [sp, #16]\n"
        "    bl _ZNKSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv\n"
        "    ldr x0, [sp, #16]\n"
        "    adrp x1, empty_string\n"
        "    add x1, x1, :lo12:empty_string\n"
        "    bl _ZNSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strERKNS_12basic_string"
        "IcS2_S3_EE\n"
        "    ldp x29, x30, [sp], #32\n"
        "    ret\n"
        "    .cfi_endproc\n"
        ".globl _ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv\n"
        ".hidden _ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv\n"
        ".type _ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv, %function\n"
        "_ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv:\n"
        "    b _ZNKSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv\n");

#else

void *_ZNKSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv(void *result,
                                                                      const void *self);
void _ZNSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strERKNS_12basic_stringIcS2_S3_EE(
    void *self, const short_string *text);
HIDDEN void *_ZNOSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv(void *result,
                                                                             void *self);

void *_ZNOSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv(void *result, void *self) {
    _ZNKSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv(result, self);
    _ZNSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strERKNS_12basic_stringIcS2_S3_EE(
        self, &empty_string);
    return result;
}

/* std::stringbuf::str() const & of C++20 is what str() const was. */
HIDDEN void *_ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv(void *result,
                                                                              const void *self);

void *_ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv(void *result,
                                                                       const void *self) {
    return _ZNKSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv(result, self);
}

#endif
