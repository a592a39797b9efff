//! The files that tasks of the engine may read. A plan that comes from a coordinator names its files itself, so the limit is here, where
//! they are opened.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use datafusion::object_store::local::LocalFileSystem;
use datafusion::object_store::path::Path;
use datafusion::object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use futures::StreamExt;
use futures::stream::BoxStream;

/// Files below a folder, to be read alone.
#[derive(Debug)]
pub(super) struct Below {
    files: LocalFileSystem,
    /// Canonical; `None` is every file.
    dir: Option<PathBuf>,
}

impl Below {
    pub(super) fn new(dir: Option<PathBuf>) -> Self {
        Self {
            files: LocalFileSystem::new(),
            dir,
        }
    }

    fn check(&self, location: &Path) -> Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let path = std::path::Path::new("/").join(location.as_ref());
        // Links and `..` lead where they lead.
        match path.canonicalize() {
            Ok(path) if path.starts_with(dir) => Ok(()),
            _ => Err(Error::PermissionDenied {
                path: location.to_string(),
                source: "not below the folder of this worker (--dir)".into(),
            }),
        }
    }
}

impl fmt::Display for Below {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "files to be read below {:?}", self.dir)
    }
}

fn refused<T>(location: &Path) -> Result<T> {
    Err(Error::PermissionDenied {
        path: location.to_string(),
        source: "workers only read".into(),
    })
}

#[async_trait]
impl ObjectStore for Below {
    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.check(location)?;
        self.files.get_opts(location, options).await
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        match self.check(prefix.unwrap_or(&Path::ROOT)) {
            Ok(()) => self.files.list(prefix),
            Err(error) => futures::stream::once(async { Err(error) }).boxed(),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.check(prefix.unwrap_or(&Path::ROOT))?;
        self.files.list_with_delimiter(prefix).await
    }

    async fn put_opts(&self, location: &Path, _: PutPayload, _: PutOptions) -> Result<PutResult> {
        refused(location)
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        refused(location)
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        locations
            .map(|location| location.and_then(|location| refused(&location)))
            .boxed()
    }

    async fn copy_opts(&self, from: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        refused(from)
    }
}

/// A runtime whose plans read files through [`Below`].
pub(super) fn runtime(
    dir: Option<PathBuf>,
    memory: Option<usize>,
) -> datafusion::error::Result<Arc<datafusion::execution::runtime_env::RuntimeEnv>> {
    let mut environment = datafusion::execution::runtime_env::RuntimeEnvBuilder::new();
    if let Some(memory) = memory {
        environment = environment.with_memory_limit(memory, 1.0);
    }
    let environment = environment.build_arc()?;
    let files = url::Url::parse("file://").map_err(|e| {
        datafusion::error::DataFusionError::Internal(format!("the name of files: {e}"))
    })?;
    environment.register_object_store(&files, Arc::new(Below::new(dir)));
    Ok(environment)
}

#[cfg(test)]
mod tests {
    use super::*;
    use datafusion::object_store::ObjectStoreExt;

    fn location(path: &std::path::Path) -> Path {
        Path::from_absolute_path(path).unwrap()
    }

    #[test]
    fn files_elsewhere_are_not_read_and_none_is_written() {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.build().unwrap().block_on(files_elsewhere());
    }

    async fn files_elsewhere() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("inner");
        std::fs::create_dir(&inner).unwrap();
        std::fs::write(folder.path().join("secret"), "no").unwrap();
        std::fs::write(inner.join("open"), "yes").unwrap();
        std::os::unix::fs::symlink(folder.path().join("secret"), inner.join("link")).unwrap();
        let store = Below::new(Some(inner.canonicalize().unwrap()));
        let open = store.get(&location(&inner.join("open"))).await.unwrap();
        assert_eq!(open.bytes().await.unwrap(), "yes");
        for closed in [folder.path().join("secret"), inner.join("link")] {
            let error = store.get(&location(&closed)).await.unwrap_err();
            assert!(error.to_string().contains("--dir"), "{error}");
        }
        let parent = location(folder.path());
        assert!(store.list(Some(&parent)).next().await.unwrap().is_err());
        let new = location(&inner.join("new"));
        assert!(store.put(&new, "text".into()).await.is_err());
        assert!(store.delete(&location(&inner.join("open"))).await.is_err());
        assert!(inner.join("open").exists() && !inner.join("new").exists());
    }
}
