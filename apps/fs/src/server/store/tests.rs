use super::*;
use std::sync::atomic::{AtomicBool, Ordering};

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn open(store: &Store, text: &str, flags: Flags) -> Result<Arc<Buffer>, Errno> {
    match store.open(&name(text), flags, 0, &Who::HOST, false)? {
        Opened::Buffer(buffer) => Ok(buffer),
        Opened::File(..) => panic!("nothing is lent"),
    }
}

const NEW: Flags = Flags(Flags::READ.0 | Flags::WRITE.0 | Flags::CREATE.0);

fn names(entries: Vec<Entry>) -> Vec<String> {
    let text = |e: Entry| String::from_utf8(e.name).unwrap();
    entries.into_iter().map(text).collect()
}

#[test]
fn the_last_close_frees_unless_buffers_are_kept() {
    for keeps in [false, true] {
        let store = Store::new(1 << 20, keeps, None).unwrap();
        let a = open(&store, "a", NEW).unwrap();
        assert_eq!(store.quota.used(), 0, "allocation is lazy");
        a.grow(5000).unwrap();
        let again = open(&store, "a", Flags::READ).unwrap();
        assert!(Arc::ptr_eq(&a, &again));
        store.close(&a, false);
        assert_eq!(store.stat(&name("a"), &Who::HOST).unwrap().size, 5000);
        store.close(&again, false);
        drop((a, again));
        assert_eq!(store.stat(&name("a"), &Who::HOST).is_ok(), keeps);
        assert_eq!(store.quota.used(), if keeps { 5000 } else { 0 });
    }
}

#[test]
fn a_lent_buffer_is_freed_when_its_programs_are_done() {
    let store = Store::new(1 << 20, false, None).unwrap();
    let Ok(Opened::File(lent, _)) = store.open(&name("a"), NEW, 4096, &Who::HOST, true) else {
        panic!("it is made");
    };
    store.sweep();
    assert_eq!(store.stat(&name("a"), &Who::HOST).unwrap().size, 4096);
    drop(lent);
    store.sweep();
    assert_eq!(store.stat(&name("a"), &Who::HOST), Err(Errno::NOENT));
    assert_eq!(store.quota.used(), 0);
}

#[test]
fn truncation_leaves_the_old_generation_to_its_readers() {
    let store = Store::new(100_000, true, None).unwrap();
    let a = open(&store, "a", NEW).unwrap();
    a.grow(60_000).unwrap();
    let (generation, old) = a.current();
    a.truncate(10, &store.quota).unwrap();
    assert_ne!(a.current().0, generation);
    assert_eq!((a.attr(&Who::HOST).size, old.size()), (10, 60_000));
    // Both count.
    assert_eq!(a.grow(50_000), Err(Errno::NOSPC));
    drop(old);
    a.grow(50_000).unwrap();
    a.truncate(70_000, &store.quota).unwrap();
    assert_eq!(a.attr(&Who::HOST).size, 70_000);
}

#[test]
fn folders_and_names() {
    let store = Store::new(1 << 20, true, None).unwrap();
    assert_eq!(open(&store, "d/x", NEW).err(), Some(Errno::NOENT));
    store.mkdir(&name("d")).unwrap();
    assert_eq!(store.mkdir(&name("d")), Err(Errno::EXIST));
    open(&store, "d/x", NEW).unwrap();
    open(&store, "d-", NEW).unwrap();
    open(&store, "dz", NEW).unwrap();
    assert_eq!(open(&store, "d/x/y", NEW).err(), Some(Errno::NOTDIR));
    assert_eq!(open(&store, "d", NEW).err(), Some(Errno::ISDIR));
    let exclusive = NEW.with(Flags::EXCLUSIVE);
    assert_eq!(open(&store, "dz", exclusive).err(), Some(Errno::EXIST));
    let root = Name::default();
    assert_eq!(
        names(store.list(&root, b"", &Who::HOST).unwrap()),
        ["d", "d-", "dz"]
    );
    assert_eq!(names(store.list(&root, b"d-", &Who::HOST).unwrap()), ["dz"]);
    assert_eq!(
        names(store.list(&name("d"), b"", &Who::HOST).unwrap()),
        ["x"]
    );
    assert_eq!(store.rmdir(&name("d")), Err(Errno::NOTEMPTY));
    store.rename(&name("d"), &name("e"), &Who::HOST).unwrap();
    assert!(
        store.stat(&name("e/x"), &Who::HOST).is_ok() && store.stat(&name("d"), &Who::HOST).is_err()
    );
    assert_eq!(
        store.rename(&name("e"), &name("e/f"), &Who::HOST),
        Err(Errno::INVAL)
    );
    store.rename(&name("dz"), &name("e/x"), &Who::HOST).unwrap();
    store.unlink(&name("e/x"), &Who::HOST).unwrap();
    store.rmdir(&name("e")).unwrap();
    assert_eq!(names(store.list(&root, b"", &Who::HOST).unwrap()), ["d-"]);
}

#[test]
fn files_of_the_folder_are_read_only_and_links_lead_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("sub")).unwrap();
    std::fs::write(dir.path().join("sub/f"), b"hello").unwrap();
    std::os::unix::fs::symlink("/etc/passwd", dir.path().join("out")).unwrap();
    rustix::fs::mkfifoat(fs::CWD, dir.path().join("pipe"), Mode::RWXU).unwrap();
    let folder = fs::open(dir.path(), OFlags::PATH, Mode::empty()).unwrap();
    let store = Store::new(1 << 20, false, Some(folder)).unwrap();
    let a = open(&store, "sub/f", Flags::READ).unwrap();
    let b = open(&store, "sub/f", Flags::READ).unwrap();
    assert!(Arc::ptr_eq(&a, &b), "loaded once");
    assert_eq!((a.attr(&Who::HOST).size, store.quota.used()), (5, 5));
    store.close(&a, false);
    store.close(&b, false);
    drop((a, b));
    assert_eq!(store.quota.used(), 0);
    for (what, flags, error) in [
        ("sub/f", NEW, Errno::ROFS),
        ("out", Flags::READ, Errno::ACCESS),
        ("pipe", Flags::READ, Errno::ACCESS),
        ("sub", Flags::READ, Errno::ISDIR),
        ("none", Flags::READ, Errno::NOENT),
    ] {
        assert_eq!(open(&store, what, flags).err(), Some(error), "{what}");
    }
    open(&store, "sub/new", NEW).unwrap();
    assert_eq!(
        names(store.list(&name("sub"), b"", &Who::HOST).unwrap()),
        ["f", "new"]
    );
    assert_eq!(
        names(store.list(&Name::default(), b"", &Who::HOST).unwrap()),
        ["sub"]
    );
    assert_eq!(store.unlink(&name("sub/f"), &Who::HOST), Err(Errno::ROFS));
}

#[test]
fn a_list_has_the_buffers_beside_a_large_folder() {
    let dir = tempfile::tempdir().unwrap();
    for i in 0..2 * MAX_ENTRIES + 10 {
        std::fs::write(dir.path().join(format!("f{i:04}")), b"").unwrap();
    }
    let folder = fs::open(dir.path(), OFlags::PATH, Mode::empty()).unwrap();
    let store = Store::new(1 << 20, true, Some(folder)).unwrap();
    for new in ["a", "f0000a", "f0001a", "z"] {
        open(&store, new, NEW).unwrap();
    }
    let (mut all, mut after) = (Vec::new(), String::new());
    loop {
        let part = names(
            store
                .list(&Name::default(), after.as_bytes(), &Who::HOST)
                .unwrap(),
        );
        let Some(last) = part.last() else { break };
        after.clone_from(last);
        all.extend(part);
    }
    assert!(all.is_sorted());
    assert_eq!(all.len(), 2 * MAX_ENTRIES + 14);
}

/// Whether the locks of the tree and of a buffer are mostly free while steps are carried out.
fn leave_others_their_turn<T>(
    store: &Store,
    prepare: impl Fn() -> T + Sync,
    step: impl Fn(T) + Sync,
) -> bool {
    let (running, over) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..10 {
                let prepared = prepare();
                running.store(true, Ordering::SeqCst);
                step(prepared);
                running.store(false, Ordering::SeqCst);
            }
            over.store(true, Ordering::SeqCst);
        });
        let (mut free, mut taken) = (0, 0);
        while !over.load(Ordering::SeqCst) {
            // Not at once again: the step needs the locks for a moment.
            for _ in 0..1000 {
                std::hint::spin_loop();
            }
            let now = running.load(Ordering::SeqCst);
            let is_free = store.tree.try_lock().is_ok_and(|tree| {
                let big = tree.nodes.get(&name("big"));
                big.is_none_or(|node| match node {
                    Node::Buffer(big) => big.state.try_lock().is_ok(),
                    Node::Dir { .. } => true,
                })
            });
            let count = if is_free { &mut free } else { &mut taken };
            *count += u32::from(now);
        }
        free > taken
    })
}

#[test]
fn long_steps_of_one_client_leave_others_their_turn() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("many")).unwrap();
    for i in 0..5000 {
        std::fs::write(dir.path().join(format!("many/{i}")), b"").unwrap();
    }
    let folder = fs::open(dir.path(), OFlags::PATH, Mode::empty()).unwrap();
    let store = Store::new(1 << 30, true, Some(folder)).unwrap();
    store.mkdir(&name("other")).unwrap();
    const BIG: u64 = 32 << 20;
    // The copy takes memory, which the file as it was made has not.
    let big = || {
        let big = open(&store, "big", NEW).unwrap();
        big.grow(BIG).unwrap();
        big.truncate(BIG - 1, &store.quota).unwrap();
    };
    big();
    let again = || open(&store, "big", NEW).unwrap();
    let cut = |big: Arc<Buffer>| {
        big.truncate(big.attr(&Who::HOST).size - 1, &store.quota)
            .unwrap();
    };
    let list = |()| drop(store.list(&name("many"), b"", &Who::HOST).unwrap());
    let remove = |()| store.unlink(&name("big"), &Who::HOST).unwrap();
    let replace = |()| {
        store
            .rename(&name("new"), &name("big"), &Who::HOST)
            .unwrap();
    };
    let new = || {
        big();
        drop(open(&store, "new", NEW).unwrap());
    };
    assert!(leave_others_their_turn(&store, again, cut));
    assert!(leave_others_their_turn(&store, || (), list));
    assert!(leave_others_their_turn(&store, new, replace));
    assert!(leave_others_their_turn(&store, big, remove));
}

#[test]
fn a_rename_that_makes_a_name_too_long_moves_nothing() {
    let store = Store::new(1 << 20, true, None).unwrap();
    let long = |c: &str| c.repeat(MAX_COMPONENT);
    store.mkdir(&name("d")).unwrap();
    open(&store, "d/a", NEW).unwrap();
    let mut deep = String::from("d");
    loop {
        let next = format!("{deep}/{}", long("x"));
        if Name::new(next.as_bytes()).is_err() {
            break;
        }
        store.mkdir(&name(&next)).unwrap();
        deep = next;
    }
    let mut last = format!("{deep}/{}", long("x"));
    while Name::new(last.as_bytes()).is_err() {
        last.pop();
    }
    if !last.ends_with('/') {
        store.mkdir(&name(&last)).unwrap();
        deep = last;
    }
    store
        .rename(&name("d"), &name(&long("e")), &Who::HOST)
        .unwrap_err();
    assert!(
        store.stat(&name("d/a"), &Who::HOST).is_ok()
            && store.stat(&name(&deep), &Who::HOST).is_ok()
    );
}

#[test]
fn empty_buffers_leave_descriptors_for_connections() {
    let mut store = Store::new(1 << 20, true, None).unwrap();
    store.quota = Quota::new(1 << 20, 2);
    for i in 0..9 {
        let opened = open(&store, &i.to_string(), NEW).map(drop);
        let want = if i < 2 { Ok(()) } else { Err(Errno::NFILE) };
        assert_eq!(opened, want);
    }
    store.unlink(&name("0"), &Who::HOST).unwrap();
    open(&store, "x", NEW).unwrap();
}

#[test]
fn a_flood_of_names_ends() {
    let store = Store::new(1 << 20, true, None).unwrap();
    let mut made = 0;
    let refused = loop {
        match store.mkdir(&name(&format!("d{made}"))) {
            Ok(()) => made += 1,
            Err(e) => break e,
        }
    };
    assert_eq!((made, refused), (MAX_NAMES, Errno::NOSPC));
}
