//! The C library's functions that ours intercept.

#![allow(non_snake_case, reason = "the C library's names")]

use libc::{
    c_char, c_int, c_long, c_uint, c_ulong, c_void, epoll_event, fd_set, gid_t, iovec, mmsghdr,
    msghdr, nfds_t, off_t, pid_t, pollfd, rlimit, sighandler_t, sigset_t, size_t, sockaddr,
    socklen_t, ssize_t, timespec, timeval, uid_t,
};

weft_sys::next! {
    "C-unwind"

    socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    bind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int;
    connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int;
    listen(fd: c_int, backlog: c_int) -> c_int;
    accept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int;
    accept4(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int;
    shutdown(fd: c_int, how: c_int) -> c_int;
    getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int;
    setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int;

    read(fd: c_int, buf: *mut c_void, n: size_t) -> ssize_t;
    readv(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t;
    recv(fd: c_int, buf: *mut c_void, n: size_t, flags: c_int) -> ssize_t;
    recvfrom(fd: c_int, buf: *mut c_void, n: size_t, flags: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> ssize_t;
    recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t;
    recvmmsg(fd: c_int, messages: *mut mmsghdr, n: c_uint, flags: c_int, timeout: *mut timespec) -> c_int;
    write(fd: c_int, buf: *const c_void, n: size_t) -> ssize_t;
    writev(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t;
    send(fd: c_int, buf: *const c_void, n: size_t, flags: c_int) -> ssize_t;
    sendto(fd: c_int, buf: *const c_void, n: size_t, flags: c_int, addr: *const sockaddr, len: socklen_t) -> ssize_t;
    sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t;
    sendmmsg(fd: c_int, messages: *mut mmsghdr, n: c_uint, flags: c_int) -> c_int;
    sendfile64(out: c_int, from: c_int, offset: *mut off_t, n: size_t) -> ssize_t;
    splice(from: c_int, from_offset: *mut off_t, to: c_int, to_offset: *mut off_t, n: size_t, flags: c_uint) -> ssize_t;

    preadv64v2(fd: c_int, iov: *const iovec, n: c_int, offset: off_t, flags: c_int) -> ssize_t;
    pwritev64v2(fd: c_int, iov: *const iovec, n: c_int, offset: off_t, flags: c_int) -> ssize_t;
    vdprintf(fd: c_int, format: *const c_char, list: *mut c_void) -> c_int;
    __vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, list: *mut c_void) -> c_int;
    aio_read64(block: *mut c_void) -> c_int;
    aio_write64(block: *mut c_void) -> c_int;
    lio_listio64(mode: c_int, list: *const *mut c_void, n: c_int, event: *mut c_void) -> c_int;

    poll(fds: *mut pollfd, n: nfds_t, timeout: c_int) -> c_int;
    ppoll(fds: *mut pollfd, n: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    select(n: c_int, r: *mut fd_set, w: *mut fd_set, e: *mut fd_set, timeout: *mut timeval) -> c_int;
    pselect(n: c_int, r: *mut fd_set, w: *mut fd_set, e: *mut fd_set, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    epoll_create(size: c_int) -> c_int;
    epoll_create1(flags: c_int) -> c_int;
    epoll_ctl(set: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int;
    epoll_wait(set: c_int, events: *mut epoll_event, n: c_int, timeout: c_int) -> c_int;
    epoll_pwait(set: c_int, events: *mut epoll_event, n: c_int, timeout: c_int, mask: *const sigset_t) -> c_int;
    epoll_pwait2(set: c_int, events: *mut epoll_event, n: c_int, timeout: *const timespec, mask: *const sigset_t) -> c_int;

    close(fd: c_int) -> c_int;
    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int;
    dup(fd: c_int) -> c_int;
    dup2(fd: c_int, to: c_int) -> c_int;
    dup3(fd: c_int, to: c_int, flags: c_int) -> c_int;
    fcntl(fd: c_int, op: c_int, arg: c_ulong) -> c_int;
    fcntl64(fd: c_int, op: c_int, arg: c_ulong) -> c_int;
    ioctl(fd: c_int, op: c_ulong, arg: c_ulong) -> c_int;
    syscall(number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long) -> c_long;
    fclose(file: *mut libc::FILE) -> c_int;
    fdopen(fd: c_int, mode: *const c_char) -> *mut libc::FILE;
    fread(to: *mut c_void, size: size_t, n: size_t, file: *mut libc::FILE) -> size_t;
    fread_unlocked(to: *mut c_void, size: size_t, n: size_t, file: *mut libc::FILE) -> size_t;

    execve(path: *const c_char, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
    execvpe(file: *const c_char, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
    fexecve(fd: c_int, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
    execveat(dir: c_int, path: *const c_char, argv: *const *const c_char, envp: *const *const c_char, flags: c_int) -> c_int;
    posix_spawn(pid: *mut pid_t, path: *const c_char, actions: *const c_void, attr: *const c_void, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
    posix_spawnp(pid: *mut pid_t, path: *const c_char, actions: *const c_void, attr: *const c_void, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
    posix_spawn_file_actions_adddup2(actions: *mut c_void, fd: c_int, to: c_int) -> c_int;
    posix_spawn_file_actions_init(actions: *mut c_void) -> c_int;
    posix_spawn_file_actions_destroy(actions: *mut c_void) -> c_int;
    posix_spawn_file_actions_addchdir_np(actions: *mut c_void, to: *const c_char) -> c_int;
    posix_spawn_file_actions_addfchdir_np(actions: *mut c_void, to: c_int) -> c_int;
    system(command: *const c_char) -> c_int;
    popen(command: *const c_char, mode: *const c_char) -> *mut libc::FILE;
    fork() -> pid_t;
    _Fork() -> pid_t;
    clone(run: *mut c_void, stack: *mut c_void, flags: c_int, arg: *mut c_void, parent: *mut c_void, tls: *mut c_void, child: *mut c_void) -> c_int;
    remap_file_pages(at: *mut c_void, len: size_t, prot: c_int, page: size_t, flags: c_int) -> c_int;
    shmat(segment: c_int, at: *const c_void, flags: c_int) -> *mut c_void;
    shmdt(at: *const c_void) -> c_int;

    signal(number: c_int, handler: sighandler_t) -> sighandler_t;
    sysv_signal(number: c_int, handler: sighandler_t) -> sighandler_t;
    __sysv_signal(number: c_int, handler: sighandler_t) -> sighandler_t;
    sigset(number: c_int, handler: sighandler_t) -> sighandler_t;
    siginterrupt(number: c_int, interrupts: c_int) -> c_int;
    sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int;
    pthread_sigmask(how: c_int, set: *const sigset_t, old: *mut sigset_t) -> c_int;
    sigprocmask(how: c_int, set: *const sigset_t, old: *mut sigset_t) -> c_int;
    madvise(at: *mut c_void, len: size_t, advice: c_int) -> c_int;
    malloc_trim(pad: size_t) -> c_int;
    pread64(fd: c_int, to: *mut c_void, n: size_t, offset: off_t) -> ssize_t;
    preadv64(fd: c_int, iov: *const iovec, n: c_int, offset: off_t) -> ssize_t;
    _exit(status: c_int) -> c_int;

    pthread_cancel(thread: libc::pthread_t) -> c_int;
    pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
    pthread_testcancel() -> ();
    longjmp(to: *mut c_void, value: c_int) -> c_int;
    _longjmp(to: *mut c_void, value: c_int) -> c_int;
    siglongjmp(to: *mut c_void, value: c_int) -> c_int;
    __longjmp_chk(to: *mut c_void, value: c_int) -> c_int;

    setuid(user: uid_t) -> c_int;
    setgid(group: gid_t) -> c_int;
    seteuid(user: uid_t) -> c_int;
    setegid(group: gid_t) -> c_int;
    setreuid(real: uid_t, effective: uid_t) -> c_int;
    setregid(real: gid_t, effective: gid_t) -> c_int;
    setresuid(real: uid_t, effective: uid_t, saved: uid_t) -> c_int;
    setresgid(real: gid_t, effective: gid_t, saved: gid_t) -> c_int;
    setfsuid(user: uid_t) -> c_int;
    setfsgid(group: gid_t) -> c_int;
    capset(head: *mut c_void, data: *const c_void) -> c_int;
    unshare(flags: c_int) -> c_int;
    setns(fd: c_int, kind: c_int) -> c_int;
    getdtablesize() -> c_int;
    getrlimit(resource: c_uint, old: *mut rlimit) -> c_int;
    setrlimit(resource: c_uint, new: *const rlimit) -> c_int;
    prlimit(process: pid_t, resource: c_uint, new: *const rlimit, old: *mut rlimit) -> c_int;
    prctl(op: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int;
}
